"""Make rows of a benchmark: by measuring on ranks that are threads, and by hand."""

from __future__ import annotations

import json

import torch

from burst_portable import run_threads
from burst_portable.bench.benchmark import Benchmark
from burst_portable.bench.entries import Entry
from burst_portable.bench.results import SCHEMA
from burst_portable.bench.task import Setting

SETTING = Setting(heads=4, kv_heads=2, head_dim=8, dtype="float32", layout="zigzag", rounds=1)


def local_threads(job, on_rows):
    """Do the work of `bench_local` in threads, with the sizes of `SETTING` and two entries."""
    entries = [Entry(name) for name in ("ring", "ulysses")]

    def work(mesh):
        benchmark = Benchmark(mesh, torch.device("cpu"), SETTING, entries)
        return [benchmark.measure(*one) for one in job.work]

    for rows in run_threads(job.ranks, work)[0]:
        on_rows(rows)


SETTINGS = {"schema": SCHEMA, "version": "1", "backend": "cpu", "heads": 4, "kv_heads": 2, "head_dim": 8,
            "dtype": "float32", "layout": "zigzag", "rounds": 3}  # fmt: skip


def write_json(path, rows, **settings):
    path.write_text(json.dumps({"settings": {**SETTINGS, **settings}, "rows": rows}, indent=1))


def measured(forward, backward, flops=1e12):
    """Return the numbers of a row with the status "ok"."""
    times = {"forward": forward, "backward": backward}
    return {
        **{f"{name}_seconds": value for name, value in times.items()},
        **{f"{name}_tflops": flops / 1e12 / value for name, value in times.items()},
        **{f"{name}_sent_bytes": 64 for name in times},
        "peak_bytes": None,
    }


def own_threads(job, on_rows):
    """Do the work of `bench_local` in threads, with the sizes of the job."""

    def work(mesh):
        benchmark = Benchmark(mesh, torch.device("cpu"), Setting(**job.setting), [Entry("ring")])
        return [benchmark.measure(*one) for one in job.work]

    for rows in run_threads(job.ranks, work)[0]:
        on_rows(rows)
