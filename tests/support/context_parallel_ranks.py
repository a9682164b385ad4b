"""Run one rank of the end-to-end benchmark on CPUs, where torch's context_parallel supports no attention operator.

This module registers the CPU's flash attention with torch's own ring, so everything else runs as on a GPU.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

from benchmarks import end_to_end

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def ring(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor | None, ...]:
    """Handle the operator as torch's `_sdpa_handler` does on GPUs. Tensors are [B, H, S, D], sharded in S."""
    mesh = args[0].device_mesh
    args = tuple(x.to_local() if isinstance(x, DTensor) else x for x in args)
    options = {"dropout_p": 0.0, "scale": kwargs.get("scale")}
    if operator is FORWARD:
        q, k, v, *rest = args  # dropout and is_causal, unless they have their defaults
        causal = bool(rest) and rest[1]
        results = torchs._templated_ring_attention(
            mesh.get_group(), 2, FORWARD, q, k, v, is_causal=causal, **options
        )  # fmt: skip
    else:
        dout, q, k, v, out, lse, _, causal = args
        results = torchs._templated_ring_attention_backward(
            mesh.get_group(), 2, BACKWARD, dout, "grad_out", q, k, v, out, lse, causal, **options
        )
    return tuple(x if x is None else DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in results)


if __name__ == "__main__":
    torchs.custom_ops.update({FORWARD: ring, BACKWARD: ring})
    end_to_end.main(sys.argv[1:])
