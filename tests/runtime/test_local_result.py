"""Test the result of a rank's queries, of which only rows that several steps compute are merged."""

from __future__ import annotations

import torch

import burst_portable as bp
from burst_portable.conformance.oracle import dense_mask
from burst_portable.kernels.reference import ReferenceKernel
from burst_portable.planning import schedule
from burst_portable.planning.call import KernelTraits


def test_rows_of_one_step_are_written_once(monkeypatch):
    """Under a window, a kernel that writes into `out` gives 16 bits except for merged rows."""
    monkeypatch.setattr(schedule, "ROWS_WORTH_A_LAUNCH", 1)
    written = []

    def attend_into(self, q, k, v, tiles, call, out, lse, *, yields_to_comm):
        written.append((out.dtype, out.shape[1]))
        made, made_lse = self.attend(q, k, v, tiles, call)
        out.copy_(made)
        lse.copy_(made_lse)

    length, mask = 1536, bp.Mask.window(100)
    whole_q, whole_k, whole_v = (torch.randn(1, length, heads, 4).bfloat16() for heads in (2, 1, 1))

    def work(mesh, sinks=None):
        mine = [bp.shard(x, mesh, layout="contiguous") for x in (whole_q, whole_k, whole_v)]
        use = {"mask": mask, "mesh": mesh, "layout": "contiguous", "kernel": "reference", "strategy": "ring"}
        return bp.attention(*mine, **use, sinks=sinks, return_lse=True)

    merged = bp.run_threads(
        3, work
    )  # this kernel does not write into given outputs, so all rows are merged and then rounded
    monkeypatch.setattr(ReferenceKernel, "attend_into", attend_into)
    monkeypatch.setattr(ReferenceKernel, "traits", KernelTraits(writes_into=True))
    made = bp.run_threads(3, work)
    assert sorted(map(str, written)) == sorted(map(str, [(torch.float32, 128), (torch.bfloat16, 384)] * 2))
    q, k, v = (x.double().transpose(1, 2) for x in (whole_q, whole_k, whole_v))
    scores = (q @ k.mT / 2).masked_fill(~dense_mask(mask, length), -torch.inf)
    out, lse = (torch.cat([one[i] for one in made], 1 + i) for i in (0, 1))
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=1e-5)
    exact = (scores.softmax(-1) @ v).transpose(1, 2)
    assert (out != exact.bfloat16()).double().mean() < 0.01  # rounded once
    assert (torch.cat([one[0] for one in merged], 1) != exact.bfloat16()).double().mean() < 0.01
    written.clear()
    bp.run_threads(3, lambda mesh: work(mesh, torch.zeros(2)))  # sinks are merged into all rows
    assert not written
    profiled = bp.run_threads(3, lambda mesh: _profiled(mesh, work))
    assert all(torch.equal(one[0], other[0]) for one, other in zip(profiled, made, strict=True))


def _profiled(mesh, work):
    with bp.profile(mesh=mesh):
        return work(mesh)
