"""Test losses that depend on outputs of padding: they differ from one device, and raise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaModel, LlamaPreTrainedModel

from burst_portable import Mesh, run_threads
from burst_portable.errors import UnsupportedError
from burst_portable.integrations.transformers import all_reduce, parallelize
from burst_portable.integrations.transformers.training.padding_gradients import PaddingGradients
from tests.support.models import LENGTH, gradients_of, make, tokens

Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "mean": lambda x, mask: x.mean(dim=1).square().sum(),
    "masked mean": lambda x, mask: ((x * mask.unsqueeze(-1)).sum(dim=1) / mask.sum(dim=1, keepdim=True)).square().sum(),
    "selected": lambda x, mask: x[mask == 1].square().sum(),
}


def mask_of(side: str) -> Tensor:
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, slice(9) if side == "left" else slice(LENGTH - 9, LENGTH)] = 0
    return mask


def step(model: Any, side: str, loss: str, of: str, mesh: Mesh | None = None) -> dict[str, Tensor]:
    """Return gradients of a loss of the states of `model.model`, or of the logits."""
    mask = mask_of(side)
    batch = {"input_ids": tokens(), "attention_mask": mask}
    x = model(**batch).logits if of == "logits" else model.model(**batch).last_hidden_state
    LOSSES[loss](x, mask).backward()
    found = gradients_of(model)
    return found if mesh is None else {name: all_reduce(g, mesh) / mesh.size for name, g in found.items()}


def on_ranks(model: Any, call: Any, of: str) -> list[Any]:
    copies = [copy.deepcopy(model) for _ in range(2)]

    def work(mesh: Mesh) -> Any:
        part = copies[mesh.rank] if of == "logits" else copies[mesh.rank].model
        parallelize(part, mesh, full_batches=True, averaged_gradients=True)
        return call(copies[mesh.rank], mesh)

    return run_threads(2, work)


@pytest.mark.parametrize("of", ["logits", "states"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("loss", ["masked mean", "selected"])
def test_losses_without_padding_equal_one_device(loss: str, side: str, of: str) -> None:
    model = make("llama")
    expected = step(copy.deepcopy(model), side, loss, of)
    for found in on_ranks(model, lambda m, mesh: step(m, side, loss, of, mesh), of):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            error = (found[name] - gradient).norm() / gradient.norm()
            assert error < 1e-6, name  # RoPE and norms are computed in float32


@pytest.mark.parametrize("of", ["logits", "states"])
@pytest.mark.parametrize("kind", ["host", "device", "unchecked"])
def test_losses_of_padding_raise(kind: str, of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a device transport the next call raises, so that no backward pass waits for the host."""
    model, words = make("llama"), "the loss depends on outputs of padding.*attention_mask == 0"

    def raised(m: Any, mesh: Mesh) -> None:
        mesh.transport("cpu").host = kind == "host"
        if kind == "host":
            with pytest.raises(UnsupportedError, match=words):
                step(m, "right", "mean", of)
            return
        step(m, "right", "masked mean", of)
        step(m, "right", "mean", of)
        with pytest.raises(UnsupportedError, match=words):
            step(m, "right", "masked mean", of)
        step(m, "right", "masked mean", of)

    if kind != "unchecked":
        on_ranks(model, raised, of)
        return
    monkeypatch.setattr(PaddingGradients, "watch", lambda *_: None)
    expected = step(copy.deepcopy(model), "right", "mean", of)["model.embed_tokens.weight"]
    for found in on_ranks(model, lambda m, mesh: step(m, "right", "mean", of, mesh), of):
        error = (found["model.embed_tokens.weight"] - expected).norm() / expected.norm()
        assert error > 1e-4, "the planted fault"


def test_infinite_gradients_do_not_look_like_padding() -> None:
    """A gradient scaler skips the step of infinite gradients, of which a mask makes NaN."""
    model = make("llama")
    parallelize(model.model, Mesh.single(), full_batches=True, averaged_gradients=True)
    mask = mask_of("right")
    states = model.model(input_ids=tokens(), attention_mask=mask).last_hidden_state
    ((states * mask.unsqueeze(-1)).sum() * torch.inf).backward()
    assert model.model.norm.weight.grad.isnan().any()


class OtherName(LlamaPreTrainedModel):
    """A model whose methods name their object otherwise."""

    def __init__(this: Any, config: Any) -> None:
        super().__init__(config)
        this.model = LlamaModel(config)
        this.head = nn.Linear(config.hidden_size, 3)

    def forward(this: Any, **batch: Any) -> Tensor:
        found: Tensor = this.head(this.model(**batch).last_hidden_state.mean(dim=1))
        return found


def test_models_around_are_found_by_any_name_of_self() -> None:
    model = OtherName(make("llama").config).double()
    batch = {"input_ids": tokens(), "attention_mask": mask_of("right")}
    with (
        parallelize(model.model, Mesh.single(), full_batches=True),
        torch.no_grad(),
        pytest.raises(UnsupportedError, match="OtherName may read the states of padding"),
    ):
        model(**batch)


class Together(torch.autograd.Function):
    """Pass outputs of a model on, as DDP does it. Those that a loss does not use have no gradient."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


def test_outputs_without_a_gradient_pass():
    weight = torch.ones(2, LENGTH, 3, requires_grad=True)
    output = {"loss": (weight * 2).sum(), "logits": weight * 3}
    PaddingGradients(Mesh.single()).watch(output, mask_of("right") == 0)
    loss, logits = Together.apply(*output.values())
    loss.backward(retain_graph=True)
    assert weight.grad is not None
    assert weight.grad.eq(2).all()
    with pytest.raises(UnsupportedError, match="depends on outputs of padding"):
        logits.sum().backward()
