"""Measure what it costs to compare the batches and parameters of the ranks in each call of a model.

    torchrun --nproc-per-node 2 -m benchmarks.guards [--seq-len 1024] [--hidden 256] [--layers 4] [--json guards.json]

A Llama with random weights trains on shards of a sequence, on CPUs over gloo or on GPUs over NCCL. Between its steps,
each rank makes the comparison that a step contains (`integrations.transformers.batch_check`) once more. Prints the
median time of both, and of the processor of rank 0, since elapsed time on a busy machine means little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import burst_portable as bp
from benchmarks.ranks import leave
from benchmarks.report import setting
from benchmarks.script import count, current_device, end, file
from burst_portable.integrations.transformers import parallelize
from burst_portable.integrations.transformers.batch_check import BatchCheck, checksum


def timed(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return the seconds that all ranks take for some work, and those of this process's processor."""
    dist.barrier()
    started, busy = time.perf_counter(), time.process_time()
    work()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    busy = time.process_time() - busy
    dist.barrier()
    return time.perf_counter() - started, busy


def measure(given: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Return the median milliseconds of a training step, and of a comparison."""
    torch.manual_seed(0)
    heads = max(1, given.hidden // 64)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=given.hidden, intermediate_size=4 * given.hidden, num_hidden_layers=given.layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=given.seq_len,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    mesh, ids = bp.Mesh.from_group(), torch.randint(0, 1024, (1, given.seq_len), device=device)
    sharded, check = parallelize(model, mesh), BatchCheck()

    def step() -> None:
        model(**sharded.shard(ids)).loss.backward()
        bp.all_reduce_gradients(model.parameters(), mesh)
        model.zero_grad()

    def compare() -> None:
        check.compare(checksum(ids, ids), given.seq_len - 1, model.parameters(), mesh, device)

    times: dict[str, list[tuple[float, float]]] = {"step": [], "comparison": []}
    for number in range(given.rounds + 2):
        for name, work in (("step", step), ("comparison", compare)):
            found = timed(work, device)
            if number >= 2:  # the first comparison reads all parameters
                times[name].append(found)
    columns = {name: zip(*pairs, strict=True) for name, pairs in times.items()}
    return {
        f"{name}, {what}": 1e3 * statistics.median(column)
        for name, pair in columns.items()
        for what, column in zip(("elapsed", "processor"), pair, strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=count, default=1024, help="Tokens. Default: 1024.")
    parser.add_argument("--hidden", type=count, default=256, help="Hidden size, in heads of 64. Default: 256.")
    parser.add_argument("--layers", type=count, default=4, help="Layers. Default: 4.")
    parser.add_argument("--rounds", type=count, default=10, help="Steps that are timed. Default: 10.")
    parser.add_argument("--json", type=file, help="Write the result to this file.")
    given = parser.parse_args()
    device = current_device()
    dist.init_process_group("gloo" if device.type == "cpu" else None)
    if device.type != "cpu":
        torch.accelerator.set_device_index(dist.get_node_local_rank())
        device = current_device()
    found: dict[str, Any] = measure(given, device)
    if dist.get_rank() == 0:
        for what in ("elapsed", "processor"):
            step, compared = (found[f"{name}, {what}"] for name in ("step", "comparison"))
            print(f"{what:10} step {step:9.2f} ms, comparison {compared:7.3f} ms, {compared / step:.2%} of it")
        if given.json is not None:
            sizes = {name: getattr(given, name) for name in ("seq_len", "hidden", "layers", "rounds")}
            result = {"setting": setting(), "ranks": dist.get_world_size(), **sizes, "milliseconds": found}
            given.json.write_text(json.dumps(result, indent=1) + "\n")
    leave()


if __name__ == "__main__":
    end(main)
