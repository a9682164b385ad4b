"""Check on the meta device that torch_npu's operators take our arguments and return the expected shapes.

    python -m backends.ascend.standin.schema

Shapes and schemas are torch_npu's, so this check is independent of the emulation, and the emulation must agree with it.
"""

from __future__ import annotations

import inspect
import sys

import torch
from torch import Tensor

from backends.ascend.standin import fusion
from burst_portable.backends.ascend.attention import FusionKernel
from burst_portable.conformance.cases import MASKS
from burst_portable.kernels.base import BackwardInputs
from burst_portable.layout import make_layout
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import Tiles, find_tiles

NAMES = ("npu_fusion_attention", "npu_fusion_attention_grad")
LENGTH = 53


class Both:
    """The real operators on meta tensors, next to the emulated ones on tensors of the same shapes."""

    def __init__(self) -> None:
        self.calls, self.layouts = 0, set[str]()

    def __getattr__(self, name: str) -> object:
        if name not in NAMES:
            raise AttributeError(name)

        def compare(*args: object, **how: object) -> object:
            real = getattr(torch.ops.npu, name)(*args, **how)
            ours = getattr(fusion, name)(*map(_solid, args), **{k: _solid(v) for k, v in how.items()})
            self.calls += 1
            self.layouts |= {x for x in args if isinstance(x, str)}
            for place, (a, b) in enumerate(zip(real, ours, strict=True)):
                if place < 3:  # later outputs are reserved or for dropout
                    same = a.shape == b.shape and a.dtype == b.dtype
                    assert same, f"{name}, output {place}: {a.shape} {a.dtype}; emulated {b.shape} {b.dtype}"
            return real

        return compare


def _solid(x: object) -> object:
    """Return a CPU tensor for a meta tensor: the compressed mask for the mask, else ones."""
    if not isinstance(x, Tensor):
        return x
    if x.dtype == torch.bool:
        return torch.ones(x.shape, dtype=torch.bool).triu(1)
    return torch.ones(x.shape, dtype=x.dtype)


def check_signatures() -> None:
    """Check that the emulated functions have the parameters, the order and the defaults of the schemas."""
    for name in NAMES:
        schema = getattr(torch.ops.npu, name).default._schema
        real = [(a.name, a.kwarg_only, a.default_value if a.has_default_value() else None) for a in schema.arguments]
        parameters = inspect.signature(getattr(fusion, name)).parameters.values()
        ours = [(p.name, p.kind is p.KEYWORD_ONLY, None if p.default is p.empty else p.default) for p in parameters]
        assert real == ours, f"{name}: {[pair for pair in zip(real, ours, strict=False) if pair[0] != pair[1]]}"


def check_calls() -> Both:
    """Run every mask through the kernel, in one block and in a pair of blocks, forward and backward."""
    both = Both()
    kernel = FusionKernel(both)
    for dtype in (torch.bfloat16, torch.float32):
        for mask in MASKS.values():
            for layout, ranks in (("contiguous", 1), ("zigzag", 2)):
                first, *_, last = make_layout(layout, LENGTH, ranks).shards * 2
                rows, columns = (sum(s.count for s in shard) for shard in (first, last))
                _attend(kernel, find_tiles(mask, first, last), rows, columns, dtype)
    return both


def _attend(kernel: FusionKernel, tiles: Tiles, rows: int, columns: int, dtype: torch.dtype) -> None:
    sizes = {"q": (rows, 4, 16), "k": (columns, 2, 16), "v": (columns, 2, 8), "dout": (rows, 4, 8)}
    q, k, v, dout = (torch.empty(2, *size, dtype=dtype, device="meta") for size in sizes.values())
    call = AttentionCall.of(q, k, v, scale=0.25)
    out, lse = kernel.attend(q, k, v, tiles, call)
    assert out.shape == dout.shape, out.shape
    assert lse.shape == (2, 4, rows), lse.shape
    into = (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
    kernel.attend_backward(BackwardInputs(dout, q, k, v, lse, delta=lse), tiles, call, into=into)


def check_refusals() -> None:
    """Check that the schemas reject a wrong name. Otherwise the calls above would prove nothing."""
    q = torch.empty(1, 8, 2, 16, device="meta", dtype=torch.bfloat16)
    for wrong in ({"pre_tokens": 4}, {"attn_mask": q}):
        try:
            torch.ops.npu.npu_fusion_attention(q, q, q, 2, "BSND", **wrong)
        except (RuntimeError, TypeError):
            continue
        raise AssertionError(f"torch_npu takes {wrong}")


def main() -> int:
    """Run all checks and return the exit code."""
    check_signatures()
    both = check_calls()
    assert both.layouts == {"BSND", "TND"}, both.layouts
    check_refusals()
    print(f"torch_npu's schemas and meta kernels: {both.calls} calls, layouts {sorted(both.layouts)}, as the emulation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
