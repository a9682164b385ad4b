"""Run the ranks of tests/integration/test_attention_processes.py: each writes the errors of its cases over gloo.

python -m tests.support.gloo_ranks RANKS FOLDER
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import cycle
from pathlib import Path

import torch
import torch._decomp.decompositions_for_jvp  # the rejected calls import these four
import torch._dynamo
import torch._functorch.aot_autograd
import torch.distributed as dist
import torch.export._trace
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import burst_portable as bp
from burst_portable.comm.base import Message
from burst_portable.comm.torch_dist import TorchDistTransport
from burst_portable.config import Config
from burst_portable.conformance.cases import LENGTH, MASKS, STRATEGIES, Case
from burst_portable.conformance.oracle import find_violations
from burst_portable.errors import BurstError, CommunicationError
from burst_portable.nn import SelfAttention
from burst_portable.planning.cost import rank_cost
from burst_portable.planning.hardware import HardwareSpec
from tests.support.attention_cases import expected, make_inputs, on_one_rank
from tests.support.forked import run_forked
from tests.support.megatron_block import errors_of_block


class Counting(TorchDistTransport):
    """Count the sent bytes."""

    sent = 0

    def post(self, sends, receives, label=""):
        self.sent += sum(m.buffer.numel() for m in sends)
        return super().post(sends, receives, label)


def wrong(mesh: bp.Mesh, case: Case) -> dict:
    inputs = make_inputs(case)
    return find_violations(on_one_rank(mesh, case, inputs), *expected(case, inputs), case.dtype)


def cases(ranks: int) -> list[Case]:
    every = [
        Case(strategy=s, ranks=ranks, heads="8x8x8x8", mask=m) for s, m in zip(STRATEGIES, cycle(MASKS), strict=False)
    ]
    uneven = [Case(strategy="burst", ranks=ranks, layout=x, mask="documents") for x in ("striped", "document_zigzag")]
    low = [Case(strategy="ring", ranks=ranks, dtype=torch.bfloat16, sinks=True), Case(ranks=ranks, softcap=5.0)]
    return [*every, *uneven, *low]


def bytes_sent(ranks: int) -> tuple[int, int]:
    """Return the measured and planned bytes of a forward and a backward pass."""
    case = Case(strategy="burst", ranks=ranks, mask="causal", layout="contiguous")
    transport = Counting(None, "gloo", batched=False)
    mesh = bp.Mesh(transport.rank, ranks, lambda device_type: transport)
    x, where = make_inputs(case), case.make_layout()
    q, k, v = (bp.shard(t, mesh, layout=where).requires_grad_() for t in (x.q, x.k, x.v))
    out = bp.attention(q, k, v, mesh=mesh, strategy="burst", layout=where)
    out.backward(bp.shard(x.dout, mesh, layout=where))
    plan = bp.plan(
        seq_len=LENGTH,
        ranks=ranks,
        heads=12,
        kv_heads=6,
        head_dim=8,
        batch=2,
        itemsize=4,
        strategy="burst",
        layout=where,
    )
    planned = [rank_cost(plan, name, mesh.rank, HardwareSpec(1, 1)).sent for name, _ in plan.passes()]
    return transport.sent, sum(planned)


def two_levels(ranks: int) -> dict[str, object]:
    """Run cases on nodes of two ranks; return what is wrong, and the peers of each transport."""
    mesh = bp.Mesh.from_group(ranks_per_node=2, config=Config(timeout=60))
    plain = mesh.transport("cpu")
    every = [Case(strategy=s, ranks=ranks, heads="8x8x8x8") for s in ("double_ring", "ring", "ulysses", "usp")]
    found = {case.strategy: wrong(mesh, case) for case in every}
    peers: dict[str, set[int]] = {"near": set(), "far": set()}
    for transport, seen in ((plain.intra_node, peers["near"]), (plain.inter_node, peers["far"])):

        def post(sends, receives, label="", *, post=transport.post, seen=seen):
            seen.update(m.peer for m in (*sends, *receives))
            return post(sends, receives, label)

        transport.post = post
    found |= {f"{case.strategy} again": wrong(mesh, case) for case in every}
    if "sort_ranks" in signature(dist.new_group).parameters:
        # Ranks of a group may have another order than those of the processes.
        group = dist.new_group([3, 1, 2, 0], sort_ranks=False)
        found["turned"] = wrong(bp.Mesh.from_group(group, ranks_per_node=2, config=Config(timeout=60)), every[0])
    dist.new_group(list(range(1, ranks)))  # torch names groups by their number: rank 0 has fewer
    known = len(distributed_c10d._world.pg_names)
    found["unequal"] = wrong(bp.Mesh.from_group(ranks_per_node=2, config=Config(timeout=20)), every[0])
    made = len(distributed_c10d._world.pg_names) - known
    found["groups"] = {} if made == 1 else {"groups that were made and not destroyed": made}
    return {"wrong": {case: what for case, what in found.items() if what}, **{k: sorted(v) for k, v in peers.items()}}


def late(rank: int) -> str:
    """Wait on rank 0 for a message that rank 1 does not send in time."""
    message = ""
    if rank == 0:
        transport = TorchDistTransport(None, "gloo", batched=False, timeout=0.5)
        _, (handle,) = transport.post([], [Message(torch.empty(8, dtype=torch.uint8), 1)], "step 0")
        try:
            handle.wait()
        except CommunicationError as error:
            message = str(error)
    return message


def error_text(function, *arguments) -> str:
    """Return the error of a call as text."""
    try:
        function(*arguments)
    except BurstError as error:
        return str(error)
    return ""


def errors_of_invalid_calls(mesh: bp.Mesh) -> dict[str, str]:
    """Make invalid calls on all ranks and return their errors."""
    x = torch.randn(1, 4, 2, 8)

    def tangent() -> None:
        with forward_ad.dual_level():
            bp.attention(forward_ad.make_dual(x, x), x, x, mesh=mesh)

    def fake() -> None:
        with FakeTensorMode():
            bp.attention(*(torch.randn(1, 4, 2, 8) for _ in range(3)), mesh=mesh)

    module, rows = SelfAttention(16, 2, mesh=mesh), torch.randn(1, 4, 16)
    full = torch.randn(1, 4, 2, 8, generator=torch.Generator().manual_seed(0))
    return {
        "full tensors": error_text(partial(bp.attention, mesh=mesh), full, full, full),
        "full tensors of a module": error_text(module, torch.ones(1, 4, 16).cumsum(1)),
        "fake": error_text(fake),
        "export": error_text(torch.export.export, module, (rows,)),
        "trace": error_text(torch.jit.trace, module, (rows,)),
        "grad": error_text(torch.func.grad(lambda q: bp.attention(q, x, x, mesh=mesh).sum()), x),
        "vmap": error_text(torch.vmap(lambda q: bp.attention(q, x, x, mesh=mesh)), torch.stack([x, x])),
        "tangent": error_text(tangent),
        "sums": error_text(bp.all_reduce, torch.ones(mesh.rank + 1), mesh),
    }


def sums_over_ranks(grid: DeviceMesh) -> list[float]:
    """Return sums of 1, 10, 100, 1000 over the ranks of a sequence and over all: one digit per rank."""
    mine = torch.tensor([10.0 ** dist.get_rank()])
    found = [bp.all_reduce(mine, mesh).item() for mesh in (grid["sequence"], grid.get_group("sequence"), None)]
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = mine.clone()
    bp.all_reduce_gradients([parameter], grid["sequence"])
    return [*found, parameter.grad.item()]


def errors_of_second_sums() -> list[str]:
    """Return the errors of sums of gradients that another mesh of the same group has summed, or will average."""
    parameter, module = torch.nn.Parameter(torch.zeros(1)), torch.nn.Linear(1, 1)
    parameter.grad, mesh = torch.ones(1), bp.Mesh.from_group()
    bp.all_reduce_gradients([parameter], mesh)
    mesh.gradient_records.averaged.add(module)  # as parallelize(model, mesh, averaged_gradients=True) does
    calls = ([parameter], None), ([parameter], bp.Mesh.from_group()), (module.parameters(), None)
    errors = [error_text(bp.all_reduce_gradients, *call) for call in calls]
    return [*errors, str(parameter.grad.item())]


def errors_of_destroyed_group(mesh: bp.Mesh) -> list[str]:
    """Return the errors of forward, backward and `all_reduce` after the group of a connected mesh is destroyed."""
    x = torch.randn(1, 8, 2, 8, generator=torch.Generator().manual_seed(mesh.rank)).requires_grad_()
    out = bp.attention(x, x, x, mesh=mesh)
    dist.barrier()
    dist.destroy_process_group(mesh.group)
    calls = (lambda: bp.attention(x, x, x, mesh=mesh), out.sum().backward, lambda: bp.all_reduce(torch.ones(1), mesh))
    return [error_text(call) for call in calls]


def main(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    mesh = bp.Mesh.from_group(config=Config(timeout=60))
    found: dict[str, object] = {"cases": {str(case): wrong(mesh, case) for case in cases(ranks)}}
    grid = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("data", "sequence"))
    pair = bp.Mesh.from_device_mesh(grid, "sequence")
    own = Case(strategy="burst", ranks=2, mask="window")
    inputs = make_inputs(own, seed=rank // 2)
    found["sub_groups"] = find_violations(on_one_rank(pair, own, inputs), *expected(own, inputs), own.dtype)
    found["sub_groups"] |= wrong(pair, replace(own, strategy="ulysses", mask="full"))
    found["summed"] = sums_over_ranks(grid)
    found["second sums"] = errors_of_second_sums()
    axes = ((2, 2, "ring"), (2, 2, "ulysses"), (1, 4, "auto"))
    found["megatron"] = {f"{sizes}": errors_of_block(*sizes) for sizes in axes}
    found["two_levels"] = two_levels(ranks)
    found["sent"], found["planned"] = bytes_sent(ranks)
    found["refused"] = errors_of_invalid_calls(mesh)
    found["cases"] |= {"after refusals": wrong(mesh, cases(ranks)[0])}
    found["destroyed"] = errors_of_destroyed_group(bp.Mesh.from_group(dist.new_group()))
    dist.barrier()
    found["late"] = late(rank)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    run_forked(int(sys.argv[1]), main, int(sys.argv[1]), Path(sys.argv[2]))
