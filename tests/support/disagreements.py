"""Define how the call of rank 1 differs and what each rank then raises. As a program, run three ranks over gloo.

python -m tests.support.disagreements FOLDER
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist

import burst_portable as bp
from burst_portable.config import Config
from burst_portable.errors import BurstError
from burst_portable.strategies.base import Strategy
from tests.support.forked import run_forked

RANKS = 3


@dataclass(frozen=True)
class Broken(Strategy):
    """A strategy with a planted mistake."""

    name: ClassVar[str] = "broken"

    def plan(self, call):
        raise TypeError("planning fell over")


USUAL = {"heads": 4, "kv_heads": 2, "dim": 8, "rows": 8, "dtype": torch.float32, "batch": 1}

# name -> (changes of rank 1, text of the error on every rank)
DISAGREEMENTS: dict[str, tuple[dict, str]] = {
    "heads": ({"heads": 8}, "heads: 4, 2 of K and V on rank 0, 2 but 8"),
    "kv_heads": ({"kv_heads": 4}, "heads: 4, 2 of K and V"),
    "head_size": ({"dim": 16}, "head sizes: 8"),
    "batch": ({"batch": 2}, "batch: 1 on rank 0, 2 but 2 on rank 1"),
    "dtype": ({"dtype": torch.bfloat16}, "dtype: float32 on rank 0, 2 but bfloat16 on rank 1"),
    "mask": ({"mask": "full"}, "mask: causal on rank 0, 2 but full on rank 1"),
    "strategy": (
        {"strategy": "burst"},
        "strategy: ring (transfer ring, backward kv) on rank 0, 2 but burst (transfer ring, backward q) on rank 1",
    ),
    "moves": (
        {"strategy": bp.make_strategy("ring", transfer="direct")},
        "ring (transfer direct, backward kv) on rank 1",
    ),
    "gradients": (
        {"strategy": bp.make_strategy("ring", gradient_comm_dtype="input"), "dtype": torch.bfloat16},
        "rounded gradients) on rank 1",
    ),
    "layout": ({"layout": "striped"}, "layout: zigzag on rank 0, 2 but striped on rank 1"),
    "scale": ({"scale": 0.5}, "scale: 0.35"),
    "softcap": ({"softcap": 5.0}, "softcap: None"),
    "sinks": ({"sinks": True}, "sinks: no on rank 0, 2 but yes on rank 1"),
    "dropout": ({"dropout_p": 0.25, "dropout_seed": 2}, "dropout: (0.5, 0) on rank 0, 2 but (0.25, 0) on rank 1"),
    "dropout_seed": ({"dropout_p": 0.5, "dropout_seed": 3}, "dropout seed: 2 on rank 0, 2 but 3 on rank 1"),
    "length": ({"rows": 9, "seq_len": 27}, "tokens: 24 on rank 0, 2 but 27 on rank 1"),
    "rows": ({"rows": 9, "seq_len": 24}, "rank 1 holds a different number of rows"),
    "boundaries": (
        {"mask": bp.Mask.documents((0, 7, 24))},
        "documents(2) on rank 0, 2 but another of that name on rank 1",
    ),
    "refusal": ({"strategy": "brst"}, "did you mean 'burst'"),
    "own_error": ({"strategy": Broken()}, "planning fell over"),
    "one_call_more": ({"twice": True}, "pass"),
}

COMMON = {
    "boundaries": {"mask": bp.Mask.documents((0, 8, 24))},
    "gradients": {"dtype": torch.bfloat16},
    "dropout": {"dropout_p": 0.5, "dropout_seed": 2},
    "dropout_seed": {"dropout_p": 0.5, "dropout_seed": 2},
}
"""What all the others do, where it is not the usual."""


def call(mesh: bp.Mesh, *, twice: bool = False, **changes) -> torch.Tensor:
    facts = {**USUAL, **{name: changes.pop(name) for name in list(changes) if name in USUAL}}
    q, k = (
        torch.randn(facts["batch"], facts["rows"], heads, facts["dim"], dtype=torch.float32).to(facts["dtype"])
        for heads in (facts["heads"], facts["kv_heads"])
    )
    if changes.pop("sinks", False):
        changes["sinks"] = torch.zeros(facts["heads"])
    options = {"mask": "causal", "strategy": "ring", "seq_len": 24, **changes}
    out = bp.attention(q.requires_grad_(), k, k, mesh=mesh, **options)
    if twice:  # a second forward pass while the other ranks run backward
        bp.attention(q, k, k, mesh=mesh, **options)
    out.sum().backward()
    return out


def error_of_rank(mesh: bp.Mesh, name: str) -> str:
    """Return the error that this rank raised, or an empty text if the call returned."""
    changes, _ = DISAGREEMENTS[name]
    try:
        call(mesh, **(changes if mesh.rank == 1 else COMMON.get(name, {})))
    except (BurstError, TypeError) as error:
        return str(error)
    return ""


def error_if_swapped(rank: int) -> str:
    """Run backward in another order on rank 1, for calls without a mesh. The group counts their passes."""
    q = torch.randn(1, 8, 2, 4, requires_grad=True)
    outs = [bp.attention(q, q, q, strategy="ring") for _ in range(2)]
    try:
        outs[rank == 1].sum().backward()
    except BurstError as error:
        return str(error)
    return ""


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), RANKS), rank=rank, world_size=RANKS)
    mesh = bp.Mesh.from_group(config=Config(timeout=20))
    call(mesh)  # all ranks then have the plan of the usual call cached
    found = {name: error_of_rank(mesh, name) for name in DISAGREEMENTS}
    # all ranks then have these plans cached too
    found["cached"] = {name: error_of_rank(mesh, name) for name in DISAGREEMENTS}
    found["swapped"] = error_if_swapped(rank)
    found["afterwards"] = "right" if bool(call(mesh).isfinite().all()) else "wrong"
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    run_forked(RANKS, main, Path(sys.argv[1]))
