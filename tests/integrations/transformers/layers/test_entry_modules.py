"""Test convolutions, pooling and group norms along tokens, which raise, and token by token, which are supported."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from burst_portable import Mesh, run_threads
from burst_portable.errors import UnsupportedError
from burst_portable.integrations.transformers import parallelize, sharded_model
from burst_portable.integrations.transformers.layers.entry_modules import mixes_tokens
from tests.support.models import (
    assert_same,
    checkpoint_activations,
    gradients_of,
    make,
    on_one_device,
    on_ranks,
    tokens,
)


class Mixed(nn.Module):
    """A layer whose input ``[B, S, H]`` has the result of a module added."""

    def __init__(self, layer: nn.Module, mix: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.mix, self.call = layer, mix.double(), call

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x + self.call(self.mix, x))
        return found


def model_of(mix: Callable[[], nn.Module], call: Callable[[Any, Tensor], Tensor]) -> Any:
    model = make("llama")
    torch.manual_seed(0)
    for layer in model.model.layers:
        layer.mlp.down_proj = Mixed(layer.mlp.down_proj, mix(), call)
    return model


def along(mix: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = mix(x.mT).mT
    return found


def of_images(mix: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = mix(x.unsqueeze(1)).squeeze(1)
    return found


def by_channel(mix: nn.Module, x: Tensor) -> Tensor:
    """Move channels to the first dimension: with 24 tokens, it is a multiple of that of all tokens."""
    return mix(x.mT.flatten(0, 1).unsqueeze(1)).view(x.mT.shape).mT


def unbatched(mix: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([mix(row.mT).mT for row in x])


ALONG: dict[str, tuple[Any, Any]] = {
    "conv2d": (lambda: nn.Conv2d(1, 1, 3, padding=1), of_images),
    "conv1d": (lambda: nn.Conv1d(48, 48, 3, padding=1), along),
    "transposed": (lambda: nn.ConvTranspose1d(48, 48, 3, padding=1), along),
    "by channel": (lambda: nn.Conv1d(1, 1, 3, padding=1), by_channel),
    "unbatched": (lambda: nn.Conv1d(48, 48, 3, padding=1), unbatched),
    "pooling": (lambda: nn.AdaptiveAvgPool1d(1), along),
    "pooling of images": (lambda: nn.AvgPool2d(3, 1, 1), of_images),
    "group norm": (lambda: nn.GroupNorm(4, 48), along),
}


@pytest.mark.parametrize("full_batches", [False, True])
@pytest.mark.parametrize("name", ALONG)
def test_module_along_tokens_raises(name: str, full_batches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the error, gradients on two ranks are others than on one device."""
    whole, ids = model_of(*ALONG[name]), tokens()

    def work(mesh: Mesh) -> dict[str, Tensor]:
        model = copy.deepcopy(whole)
        sharded = parallelize(model, mesh, full_batches=full_batches)
        model(**{"input_ids": ids, "labels": ids} if full_batches else sharded.shard(ids)).loss.backward()
        return gradients_of(model)

    told = r"tokens that interact outside attention, in model\.layers\.0\.mlp\.down_proj\.mix \(\w+\); got an input of"
    for ranks in (1, 2):
        with pytest.raises(UnsupportedError, match=told):
            run_threads(ranks, work)
    monkeypatch.setattr(sharded_model, "watch_entries", lambda _: [])
    monkeypatch.setattr(sharded_model, "entries_to_call", lambda _: {})
    (expected,), parts = run_threads(1, work), run_threads(2, work)
    embedding = "model.embed_tokens.weight"
    total = sum(part[embedding] for part in parts)
    assert (total - expected[embedding]).norm() > 1e-4 * expected[embedding].norm()  # that of equal models: < 1e-7


def by_token(mix: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = mix(x.flatten(0, 1)).view(x.shape)
    return found


def over_features(mix: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = mix(x.flatten(0, 1).unsqueeze(1)).view(x.shape)
    return found


def pooled(mix: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = mix(x)
    return found


BY_TOKEN: dict[str, tuple[Any, Any]] = {
    "group norm": (lambda: nn.GroupNorm(4, 48), by_token),
    "group norm of heads": (lambda: nn.GroupNorm(2, 4), lambda mix, x: mix(x.view(-1, 4, 12)).view(x.shape)),
    "conv1d": (lambda: nn.Conv1d(1, 1, 3, padding=1), over_features),
    "pooling": (lambda: nn.AvgPool1d(3, 1, 1), pooled),
    "flat pooling": (lambda: nn.AvgPool1d(3, 1, 1), by_token),
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", BY_TOKEN)
def test_module_token_by_token_equals_one_device(name: str, ranks: int) -> None:
    model, ids = model_of(*BY_TOKEN[name]), tokens()
    expected = on_one_device(model, ids)
    for answer in on_ranks(ranks, model, ids):
        assert_same(answer, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_module_is_computed_again_in_the_backward_pass(use_reentrant: bool) -> None:
    """The second call has other numbers of tokens than the one whose layers are computed again."""
    model = model_of(*BY_TOKEN["conv1d"])
    checkpoint_activations(model, use_reentrant=use_reentrant)
    models = [copy.deepcopy(model) for _ in range(2)]

    def work(mesh: Mesh) -> None:
        mine = models[mesh.rank]
        mine.model.embed_tokens.register_forward_hook(lambda module, args, x: x)
        sharded = parallelize(mine, mesh)
        inputs = [sharded.shard(tokens(1, length)) for length in (40, 64)]
        losses = [mine(**part).loss for part in inputs]
        for loss in reversed(losses):
            loss.backward()
        assert gradients_of(mine)

    run_threads(2, work)


def test_as_many_features_as_tokens_raise() -> None:
    """The shape of the input does not show which are which: 48 tokens on each rank, with 48 features."""
    models = [model_of(*BY_TOKEN["conv1d"]) for _ in range(2)]

    def work(mesh: Mesh) -> None:
        sharded = parallelize(models[mesh.rank], mesh)
        with pytest.raises(
            UnsupportedError, match=r"shape \[48, 1, 48\], with 1 rows of 48 tokens.*no other dimension"
        ):
            models[mesh.rank](**sharded.shard(tokens(1, 96)))

    run_threads(2, work)


def with_weights(mix: Any, x: Tensor) -> Tensor:
    """Call the function of a convolution, as layers do with `causal_conv1d`."""
    found: Tensor = nn.functional.conv1d(x.mT, mix.weight, mix.bias, padding=1).mT
    return found


def test_weights_of_a_convolution_that_is_not_called_raise() -> None:
    models = [model_of(lambda: nn.Conv1d(48, 48, 3), with_weights) for _ in range(2)]

    def work(mesh: Mesh) -> None:
        sharded = parallelize(models[mesh.rank], mesh)
        with pytest.raises(UnsupportedError, match=r"down_proj\.mix \(Conv1d\); got a module that was not called"):
            models[mesh.rank](**sharded.shard(tokens()))

    run_threads(2, work)


@pytest.mark.parametrize(
    ("module", "shape", "mixes"),
    [
        (nn.GroupNorm(4, 16), (10, 16), False),
        (nn.GroupNorm(1, 5), (10, 5), False),  # channels are not tokens
        (nn.GroupNorm(4, 16), (10, 16, 5), True),
        (nn.GroupNorm(4, 16), (2, 16, 5), True),
        (nn.Conv1d(1, 1, 3), (10, 1, 16), False),
        (nn.Conv1d(10, 1, 3), (10, 16), True),  # without a batch dimension
        (nn.Conv2d(1, 1, 3), (10, 1, 4, 5), True),
        (nn.Conv2d(1, 1, 3), (20, 1, 4, 4), True),
        (nn.AvgPool1d(2), (2, 5, 16), False),
        (nn.AvgPool1d(2), (2, 16, 5), True),
        (nn.MaxPool1d(2), (10, 16), False),
        (nn.AvgPool2d(2), (2, 5, 4, 4), False),
        (nn.AvgPool2d(2), (2, 1, 5, 16), True),
    ],
)
def test_mixes_tokens_of_shapes(module: nn.Module, shape: tuple[int, ...], mixes: bool) -> None:
    """Each call has two rows with five tokens."""
    assert mixes_tokens(module, shape, 2, 5) is mixes


@pytest.mark.parametrize(("shape", "mixes"), [((3, 8, 1), True), ((3, 8), False)])
def test_mixes_tokens_of_one_token(shape: tuple[int, ...], mixes: bool) -> None:
    assert mixes_tokens(nn.GroupNorm(2, 8), shape, 3, 1) is mixes
