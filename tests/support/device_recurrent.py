"""Run one rank of tests/device/test_recurrent_layers.py: a hybrid with Gated DeltaNet, with or without kernels of fla.

python -m tests.support.device_recurrent FOLDER RANK RANKS reference|fla

If fla raises an error in place of gradients, the results have none, and the text of the error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

IS_REFERENCE = sys.argv[-1:] == ["reference"]
if IS_REFERENCE:
    sys.modules["fla"] = None  # type: ignore[assignment]  # Transformers then computes with operators of torch

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM  # noqa: E402

from burst_portable import Mesh, all_reduce, all_reduce_gradients, unshard  # noqa: E402
from burst_portable.integrations.transformers import parallelize  # noqa: E402
from burst_portable.integrations.transformers.models.recurrent_layers import recurrent_layers  # noqa: E402
from tests.support.device_programs import join, start  # noqa: E402

TOKENS = 700
CASES: dict[str, tuple[int, ...] | None] = {"one document": None, "packed": (0, 130, 470, TOKENS)}
Results: TypeAlias = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Loss and logits, and the gradients by the names of parameters."""
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


def refusal_of_fla(device: torch.device) -> str:
    """Return the error that fla raises in place of gradients on this device with this Triton; "" if there is none."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v = (torch.randn(1, 64, 2, 64, device=device, requires_grad=True) for _ in range(3))
    gate, beta = torch.full((2, 1, 64, 2), -0.5, device=device).unbind()
    out, _ = chunk_gated_delta_rule(q, k, v, g=gate, beta=beta.neg())
    try:
        out.sum().backward()
    except RuntimeError as error:
        if "produces incorrect results" not in str(error):
            raise
        return str(error)
    return ""


def results_of(model: Any, loss: Tensor, logits: Tensor) -> Results:
    found = {name: p.grad.cpu().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"loss": loss.detach().cpu().reshape(1), "logits": logits.detach().cpu()}, found


def on_one_device(model: Any, ids: Tensor, cu_seqlens: tuple[int, ...] | None) -> Results:
    """Return the results of plain Transformers, which computes documents one by one."""
    parts = [ids[:, a:b] for a, b in pairwise(cu_seqlens or (0, TOKENS))]
    count = sum(part.shape[1] - 1 for part in parts)
    total, logits = torch.zeros((), device=ids.device), []
    for part in parts:
        out = model(input_ids=part, labels=part, use_cache=False)
        loss = out.loss * (part.shape[1] - 1) / count
        if loss.requires_grad:
            loss.backward()
        total += loss.detach()
        logits.append(out.logits.detach())
    return results_of(model, total, torch.cat(logits, dim=1))


def on_ranks(model: Any, ids: Tensor, cu_seqlens: tuple[int, ...] | None, mesh: Mesh) -> Results:
    """Return the results of this library: the sums of losses and gradients, and the logits of all tokens."""
    with parallelize(model, mesh) as sharded:
        out = model(**sharded.shard(ids, cu_seqlens=cu_seqlens))
        if out.loss.requires_grad:
            out.loss.backward()
            all_reduce_gradients(model.parameters(), mesh)
        layout = sharded.layout_of(TOKENS, cu_seqlens)
    logits = unshard(out.logits.detach(), mesh, seq_len=TOKENS, layout=layout)
    return results_of(model, all_reduce(out.loss.detach().reshape(1), mesh), logits)


def main(folder: Path, rank: int, ranks: int, kind: str) -> None:
    device = join(folder, rank, ranks)
    refusal = "" if IS_REFERENCE else refusal_of_fla(device)
    calls = None if IS_REFERENCE else count_calls_of_fla()
    model = make(device).requires_grad_(not refusal)
    ids = torch.randint(0, 256, (1, TOKENS), generator=torch.Generator().manual_seed(1)).to(device)
    mesh = Mesh.from_group() if ranks > 1 else None
    found: dict[str, Any] = {
        case: on_one_device(model, ids, documents) if mesh is None else on_ranks(model, ids, documents, mesh)
        for case, documents in CASES.items()
    }
    assert calls is None or calls() >= 4, "two layers in each case"
    torch.save(found | {"refusal": refusal}, folder / f"{kind} {rank} of {ranks}.pt")


if __name__ == "__main__":
    start(main)
