"""Run one rank of tests/device/test_recurrent_layers.py: a hybrid with Gated DeltaNet, with or without kernels of fla.

python -m tests.support.device_recurrent FOLDER RANK RANKS reference|fla
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

IS_REFERENCE = sys.argv[-1:] == ["reference"]
if IS_REFERENCE:
    sys.modules["fla"] = None  # type: ignore[assignment]  # Transformers then computes with operators of torch

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM  # noqa: E402

from burst_portable import Mesh, all_reduce, all_reduce_gradients  # noqa: E402
from burst_portable.integrations.transformers import parallelize  # noqa: E402
from burst_portable.integrations.transformers.recurrent_layers import recurrent_layers  # noqa: E402
from tests.support.device_programs import join, start  # noqa: E402

TOKENS = 700
CASES: dict[str, tuple[int, ...] | None] = {"one document": None, "packed": (0, 130, 470, TOKENS)}
LAYERS = ["linear_attention", "linear_attention", "full_attention"]


def make(device: torch.device) -> Any:
    """Return a model in float32 whose states decay slowly, so that tokens of other ranks count."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=256, hidden_size=128, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=64,
        linear_value_head_dim=64, layer_types=LAYERS, mlp_only_layers=[0, 1, 2], max_position_embeddings=TOKENS,
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config).train()
    if not recurrent_layers(model):
        raise ImportError("this release of Transformers has recurrent layers that take no state of another rank")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.rand(parameter.shape) - 4)
            elif parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
    return model.to(device)


def count_calls_of_fla() -> Callable[[], int]:
    """Count the launches of fla's chunked delta rule from now on, and return a function that returns their number."""
    from fla.ops.gated_delta_rule.chunk import ChunkGatedDeltaRuleFunction

    calls, original = [0], ChunkGatedDeltaRuleFunction.apply

    def counted(*arguments: Any) -> Any:
        calls[0] += 1
        return original(*arguments)

    ChunkGatedDeltaRuleFunction.apply = counted
    return lambda: calls[0]


def results_of(model: Any, loss: Tensor) -> dict[str, Tensor]:
    found = {name: p.grad.cpu().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"loss": loss.detach().cpu().reshape(1), **found}


def on_one_device(model: Any, ids: Tensor, cu_seqlens: tuple[int, ...] | None) -> dict[str, Tensor]:
    """Return the results of plain Transformers, which computes documents one by one."""
    parts = [ids[:, a:b] for a, b in pairwise(cu_seqlens or (0, TOKENS))]
    count = sum(part.shape[1] - 1 for part in parts)
    total = torch.zeros((), device=ids.device)
    for part in parts:
        loss = model(input_ids=part, labels=part, use_cache=False).loss * (part.shape[1] - 1) / count
        loss.backward()
        total += loss.detach()
    return results_of(model, total)


def on_ranks(model: Any, ids: Tensor, cu_seqlens: tuple[int, ...] | None, mesh: Mesh) -> dict[str, Tensor]:
    with parallelize(model, mesh) as sharded:
        loss = model(**sharded.shard(ids, cu_seqlens=cu_seqlens)).loss
        loss.backward()
        all_reduce_gradients(model.parameters(), mesh)
    return results_of(model, all_reduce(loss.detach().reshape(1), mesh))


def main(folder: Path, rank: int, ranks: int, kind: str) -> None:
    device = join(folder, rank, ranks)
    calls = None if IS_REFERENCE else count_calls_of_fla()
    model = make(device)
    ids = torch.randint(0, 256, (1, TOKENS), generator=torch.Generator().manual_seed(1)).to(device)
    mesh = Mesh.from_group() if ranks > 1 else None
    found = {
        case: on_one_device(model, ids, documents) if mesh is None else on_ranks(model, ids, documents, mesh)
        for case, documents in CASES.items()
    }
    assert calls is None or calls() >= 4, "two layers in each case"
    torch.save(found, folder / f"{kind} {rank} of {ranks}.pt")


if __name__ == "__main__":
    start(main)
