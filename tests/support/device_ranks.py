"""Run one rank of tests/device/test_ranks.py: every strategy over the process group of this machine's accelerators."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import burst_portable as bp
from burst_portable.backends.selection import for_device
from burst_portable.conformance import oracle
from burst_portable.conformance.cases import LENGTH, MASKS, STRATEGIES, Case
from burst_portable.conformance.oracle import Answer, find_violations

HEADS, KV_HEADS, DIM = 8, 4, 64


def tried(ranks: int) -> dict[str, tuple[str, str, str, torch.dtype]]:
    """Return name -> (mask, layout, strategy, dtype). Masks and layouts alternate over the strategies."""
    cases = {}
    for index, (strategy, mask) in enumerate((s, m) for s in STRATEGIES for m in ("causal", "documents", "window")):
        layout = ("zigzag", "striped", "contiguous")[index % 3]
        dtype = (torch.bfloat16, torch.float32)[index % 2]
        if Case(strategy=strategy, ranks=ranks, heads=f"{HEADS}x{KV_HEADS}x{DIM}x{DIM}").possible():
            cases[f"{strategy}-{mask}-{layout}-{dtype}"] = (mask, layout, strategy, dtype)
    return cases


def wrong(mesh: bp.Mesh, device: torch.device, mask: str, layout: str, strategy: str, dtype: torch.dtype) -> dict:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, LENGTH, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    whole = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    where = bp.make_layout(layout, LENGTH, mesh.size, MASKS[mask])
    q, k, v, dout = (bp.shard(x.to(device), mesh, layout=where) for x in whole)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    chosen = STRATEGIES[strategy]
    out, lse = bp.attention(*leaves, mask=MASKS[mask], mesh=mesh, strategy=chosen, layout=where, return_lse=True)
    out.backward(dout)

    def together(x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        return bp.unshard(x.detach(), mesh, seq_len=LENGTH, layout=where, dim=dim)

    answer = Answer(together(out), together(lse, 2), *(together(x.grad) for x in leaves))
    seen = oracle.dense_mask(MASKS[mask], LENGTH)
    exact, plain = (oracle.attention(*whole, seen, scale=DIM**-0.5, dtype=t) for t in (torch.float64, dtype))
    return find_violations(answer, exact, plain, dtype)


def main(ranks: int, folder: Path, rank: int) -> None:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    device = torch.device(kind.type, rank)
    torch.accelerator.set_device_index(rank)
    group = for_device(device.type).capabilities.process_group
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group(group, store=store, rank=rank, world_size=ranks, device_id=device)
    mesh = bp.Mesh.from_group()
    found = {name: wrong(mesh, device, *case) for name, case in tried(ranks).items()}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
