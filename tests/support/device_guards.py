"""Run one rank of tests/device/test_guards.py: record where the host waits for its device in a training step.

python -m tests.support.device_guards FOLDER RANK RANKS
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from burst_portable import Mesh, all_reduce_gradients
from burst_portable.integrations.transformers import parallelize
from tests.support.device_programs import join, start
from tests.support.host_reads import recorded_waits

TOKENS, WARM_UP = 1024, 3
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": TOKENS,
    "use_cache": False,
}


def make(kind: str, device: torch.device) -> Any:
    """Return a model in training mode, equal on all ranks."""
    torch.manual_seed(0)
    if kind == "experts":
        sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
        model: Any = MixtralForCausalLM(MixtralConfig(**SIZES, **sizes))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return model.to(device, dtype).train()


def step_of(case: str, device: torch.device, mesh: Mesh) -> Callable[[], Tensor]:
    """Return a training step, which returns its loss."""
    model = make(case, device)
    ids = torch.randint(0, 512, (2, TOKENS), generator=torch.Generator().manual_seed(1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if case in ("full batches", "llama on one device"):
        batch = {"input_ids": ids, "labels": ids}
        if case == "full batches":
            parallelize(model, mesh, full_batches=True)
        call = lambda: model(**batch).loss  # noqa: E731
    else:
        sharded = parallelize(model, mesh)
        if case == "fsdp":
            for layer in [*model.model.layers, model]:
                fully_shard(layer)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        options = {"cu_seqlens": (0, 300, 301, TOKENS)} if case == "packed" else {}
        call = lambda: model(**sharded.shard(ids, **options)).loss  # noqa: E731

    def step() -> Tensor:
        loss = call()
        (loss * mesh.size if case == "fsdp" else loss).backward()
        if case not in ("fsdp", "llama on one device"):
            all_reduce_gradients(model.parameters(), mesh)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def step_without_gradient(device: torch.device, mesh: Mesh) -> Callable[[], None]:
    """Return a sum of gradients of which the last rank has none, so that it asks the other ranks."""
    parameters = [torch.zeros(5, device=device, requires_grad=True) for _ in range(2)]

    def step() -> None:
        for number, parameter in enumerate(parameters):
            is_missing = number and mesh.rank == mesh.size - 1
            parameter.grad = None if is_missing else torch.ones_like(parameter)
        all_reduce_gradients(parameters, mesh)

    return step


def waits_of(step: Callable[[], object], device: torch.device) -> list[str]:
    """Return the places where the host waits in a step after others."""
    for _ in range(WARM_UP):
        step()
    if device.type != "cuda":
        return []
    torch.cuda.synchronize()
    with recorded_waits() as places:
        step()
    return places


def main(folder: Path, rank: int, ranks: int) -> None:
    device = join(folder, rank, ranks)
    mesh = Mesh.from_group(dist.group.WORLD)
    found = {}
    for case in ("llama on one device", "llama", "packed", "full batches", "experts", "fsdp"):
        found[case] = waits_of(step_of(case, device, mesh), device)
    found["without gradient"] = waits_of(step_without_gradient(device, mesh), device)
    (folder / f"waits {rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    start(main)
