"""Test modules whose results for a token depend on other tokens: a shard has other ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization

from burst_portable import Mesh, run_threads
from burst_portable.errors import UnsupportedError
from burst_portable.integrations.transformers import parallelize
from burst_portable.integrations.transformers.models import checks
from tests.support.models import gradients_of, make, tokens


class Observed(nn.Module):
    """A layer whose input is rounded to 256 numbers between the smallest and the largest of a call."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.of_input = layer, quantization.FakeQuantize(quantization.MinMaxObserver)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(self.of_input(x.float()).to(x.dtype))
        return found


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.lstm = layer, nn.LSTM(48, 48, batch_first=True, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(self.lstm(x)[0])
        return found


class Normalized(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm = layer, nn.BatchNorm1d(48, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(self.norm(x.transpose(1, 2)).transpose(1, 2))
        return found


def replaced(kind: Callable[[nn.Module], nn.Module]) -> Any:
    model = make("llama")
    torch.manual_seed(0)
    for layer in model.model.layers:
        layer.mlp.down_proj = kind(layer.mlp.down_proj)
    return model


def counting() -> Any:
    model = make("llama")
    model.model.embed_tokens.scale_grad_by_freq = True
    return model


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "frequencies": (counting, r"model\.embed_tokens \(Embedding with scale_grad_by_freq\)"),
    "ranges": (lambda: replaced(Observed), r"model\.layers\.0\.mlp\.down_proj\.of_input \(FakeQuantize\)"),
    "recurrent": (lambda: replaced(Recurrent), r"down_proj\.lstm \(LSTM\)"),
    "batch norm": (lambda: replaced(Normalized), r"down_proj\.norm \(BatchNorm1d\)"),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_modules_that_mix_tokens_raise(name: str, monkeypatch: pytest.MonkeyPatch):
    """Without the error, gradients on two ranks are others than on one device."""
    make_model, told = MODELS[name]
    with pytest.raises(UnsupportedError, match=f"tokens that interact outside attention, in .*{told}"):
        parallelize(make_model(), Mesh.single())

    monkeypatch.setattr(checks, "token_mixing_module", lambda *_: None)
    ids, models = tokens(), [make_model() for _ in range(3)]

    def work(mesh: Mesh) -> dict[str, Tensor]:
        model = models[mesh.rank + mesh.size - 1]
        sharded = parallelize(model, mesh)
        model(**sharded.shard(ids)).loss.backward()
        return gradients_of(model)

    (expected,), parts = run_threads(1, work), run_threads(2, work)
    name = "model.embed_tokens.weight"
    total = sum(part[name] for part in parts)
    assert (total - expected[name]).norm() > 1e-4 * expected[name].norm()  # that of equal models is below 1e-7


def test_modules_of_weights_pass():
    """Observers of weights see the same numbers on all ranks. A limited norm changes weights of some rows."""
    model = make("llama")
    model.model.layers[0].mlp.weight_fake_quant = quantization.FakeQuantize(quantization.MinMaxObserver)
    parallelize(model, Mesh.single()).undo()
    model.model.embed_tokens.max_norm = 1.0
    with pytest.raises(UnsupportedError, match="Embedding with max_norm"):
        parallelize(model, Mesh.single())
    model.model.embed_tokens.max_norm = None
    # torch warns that the original of this class is deprecated.
    kind = type("Linear", (nn.Linear,), {"__module__": "torch.ao.nn.quantized.dynamic.modules.linear"})
    model.model.layers[1].self_attn.q_proj.__class__ = kind
    with pytest.raises(UnsupportedError, match=r"layers\.1\.self_attn\.q_proj \(Linear\)"):
        parallelize(model, Mesh.single())
