"""Run the ranks of tests/bench/test_peers.py over gloo: rows of other libraries, and of planted packages.

python -m tests.support.peer_ranks RANKS FOLDER

FOLDER/planted has the planted packages. Rank 0 writes FOLDER/rows.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from burst_portable.bench.benchmark import Benchmark
from burst_portable.bench.entries import Entry
from burst_portable.bench.peer_names import PEERS
from burst_portable.bench.peers import make_peer
from burst_portable.bench.task import Setting
from burst_portable.mesh import Mesh
from tests.support.context_parallel_ranks import BACKWARD, FORWARD, ring, torchs
from tests.support.forked import run_forked

SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 16, "layout": "zigzag", "rounds": 1}


def main(rank: int, ranks: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    mesh, rows = Mesh.from_group(), {}

    def measure(label: str, dtype: str, mask: str, length: int, *names: str) -> None:
        entries = [make_peer(name) if name in PEERS else Entry(name) for name in names]
        benchmark = Benchmark(mesh, torch.device("cpu"), Setting(dtype=dtype, **SIZES), entries)
        rows[label] = {row["entry"]: row for row in benchmark.measure(mask, length, "auto", names)}

    for mask in ("full", "causal", "causal_document", "full_sliding"):
        measure(mask, "bfloat16", mask, 128, "ring", *PEERS)
    measure("uneven", "bfloat16", "causal", 126, "ring", *PEERS)
    measure("float32", "float32", "causal", 128, "ring", "ring_flash_attn", "yunchang")
    torchs.custom_ops.update({FORWARD: ring, BACKWARD: ring})
    for mask in ("full", "causal"):
        names = ("context_parallel", "ring", "context_parallel_alltoall")
        measure(f"{mask}, operators", "float32", mask, 128, *names)
    sys.path.insert(0, str(folder / "planted"))
    measure("planted", "bfloat16", "causal", 128, "ring_flash_attn", "yunchang", "ring")
    for mask in ("sink_sliding", "share_question"):
        measure(f"{mask}, magi", "float32", mask, 2048, "magi_attention")
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_forked(int(sys.argv[1]), main, int(sys.argv[1]), Path(sys.argv[2]))
