"""Test that the ranks of `bench` start again without an entry that ended one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from burst_portable.cli.bench_worker import BenchJob, bench_local
from burst_portable.errors import PeerLostError


def test_bench_goes_on_without_an_entry_that_ended_a_rank(monkeypatch):
    """Ranks start again without it. Its other rows are failed, too; a rank lost elsewhere ends the command."""
    runs, rows = [], []

    def run_processes(job, folder, on_step, worker):
        runs.append(job.work)
        for mask, _, _, names in job.work:
            for name in names:
                on_step({"entry": name})
                if name == "dies":
                    raise PeerLostError("rank 1 ended with code 3")
            on_step({"entry": ""})
            if mask == "prefix_lm":
                raise PeerLostError("rank 1 ended later")
            on_step({"rows": [{"mask": mask, "entry": name, "status": "ok"} for name in names]})

    monkeypatch.setattr("burst_portable.cli.bench_worker.run_processes", run_processes)
    work = [(mask, 64, "auto", ["ring", "dies"]) for mask in ("full", "causal")]
    job = BenchJob(ranks=2, ranks_per_node=None, backend="cpu", device_type="cpu", setting={}, work=work)
    bench_local(job, rows.extend)
    assert runs == [work, [(mask, 64, "auto", ["ring"]) for mask in ("full", "causal")]]
    assert [(row["mask"], row["entry"], row["status"], row.get("reason")) for row in rows] == [
        ("full", "dies", "failed", "rank 1 ended with code 3"),
        ("causal", "dies", "failed", "it does not run again, since it ended a rank on full"),
        ("full", "ring", "ok", None),
        ("causal", "ring", "ok", None),
    ]
    with pytest.raises(PeerLostError, match="later"):
        bench_local(replace(job, work=[("prefix_lm", 64, "auto", ["ring"])]), rows.extend)
