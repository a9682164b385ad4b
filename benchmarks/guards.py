"""Measure what the checks of a parallelized model cost, such as the comparison of the ranks' batches in each call.

    torchrun --nproc-per-node 2 -m benchmarks.guards [--seq-len 1024] [--hidden 256] [--layers 4] [--json guards.json]

A Llama with random weights trains on shards of a sequence, on CPUs over gloo or on GPUs over NCCL. Its steps alternate
with those of an equal model that is not parallelized: it has the same attention over the ranks and no checks. After
them, each rank makes the comparison that a step contains (`BatchCheck` of `integrations.transformers`) once more.
Prints the median time of each, and of the processor of rank 0, since elapsed time on a busy machine means little. The
ratio of both kinds of steps is taken in each round; its quartiles show whether it differs from 1.

--together steps run without a wait for the device between them, as in training.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM

import burst_portable as bp
from benchmarks.ranks import leave
from benchmarks.report import setting
from benchmarks.script import count, current_device, end, file
from burst_portable.integrations.transformers import parallelize
from burst_portable.integrations.transformers.training.batch_check import BatchCheck, checksum

UNCHECKED = "unchecked"
NAMES = ("step", "step without checks", "comparison")
KINDS = ("elapsed", "processor")
"""Kinds of time."""


def without_checks(model: Any, mesh: bp.Mesh, ids: Tensor) -> Callable[[], Tensor]:
    """Return a call of a copy of a model that returns this rank's part of its loss, with no check of the ranks."""
    seq_len = ids.shape[1]

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, **options: Any) -> tuple[Tensor, None]:
        heads_last = (x.transpose(1, 2) for x in (q, k, v))
        return bp.attention(*heads_last, mesh=mesh, seq_len=seq_len, scale=options["scaling"]), None

    AttentionInterface.register(UNCHECKED, attend)
    AttentionMaskInterface.register(UNCHECKED, lambda *_, **__: None)
    model.set_attn_implementation(UNCHECKED)

    def call() -> Tensor:
        batch = bp.shard_batch(ids, mesh=mesh)
        count = {"num_items_in_batch": seq_len - 1, "shift_labels": batch["labels"]}
        loss: Tensor = model(**batch, **count, use_cache=False).loss
        return loss

    return call


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


def quartiles(values: Iterable[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    found = list(values)
    low, middle, high = statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else found * 3
    return low, middle, high


def ratios(times: dict[str, list[tuple[float, float]]]) -> dict[str, tuple[float, float, float]]:
    """Return the quartiles of the quotients of a step and the step without checks of the same round.

    Args:
        times: Elapsed seconds and those of the processor, in each round.
    """
    rounds = list(zip(times["step"], times["step without checks"], strict=True))
    return {what: quartiles(step[i] / without[i] for step, without in rounds) for i, what in enumerate(KINDS)}


def measure(given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the median milliseconds of a training step, of one without checks, and of a comparison, and `ratios`."""
    torch.manual_seed(0)
    heads = max(1, given.hidden // 64)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=given.hidden, intermediate_size=4 * given.hidden, num_hidden_layers=given.layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=given.seq_len,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    mesh, ids = bp.Mesh.from_group(), torch.randint(0, 1024, (1, given.seq_len), device=device)
    unchecked = copy.deepcopy(model)
    call = without_checks(unchecked, mesh, ids)
    sharded, check = parallelize(model, mesh), BatchCheck()

    def step() -> Tensor:
        loss: Tensor = model(**sharded.shard(ids)).loss
        loss.backward()
        bp.all_reduce_gradients(model.parameters(), mesh)
        model.zero_grad()
        return loss.detach()

    def step_without() -> Tensor:
        loss = call()
        loss.backward()
        bp.all_reduce_gradients(unchecked.parameters(), mesh)
        unchecked.zero_grad()
        return loss.detach()

    def compare() -> None:
        check.compare(checksum(ids, ids), given.seq_len - 1, model.parameters(), mesh, device)

    torch.testing.assert_close(step(), step_without(), rtol=1e-3, atol=0)
    works: dict[str, Callable[[], Any]] = dict(zip(NAMES, (step, step_without, compare), strict=True))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for number in range(given.rounds + 2):
        for name, work in works.items():
            elapsed, busy = timed(lambda work=work: [work() for _ in range(given.together)], device)
            if number >= 2:  # the first comparison reads all parameters
                times[name].append((elapsed / given.together, busy / given.together))
    columns = {name: zip(*pairs, strict=True) for name, pairs in times.items()}
    milliseconds = {
        f"{name}, {what}": 1e3 * statistics.median(column)
        for name, pair in columns.items()
        for what, column in zip(KINDS, pair, strict=True)
    }
    return {"milliseconds": milliseconds, "ratio of steps, quartiles": ratios(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=count, default=1024, help="Tokens. Default: 1024.")
    parser.add_argument("--hidden", type=count, default=256, help="Hidden size, in heads of 64. Default: 256.")
    parser.add_argument("--layers", type=count, default=4, help="Layers. Default: 4.")
    parser.add_argument("--rounds", type=count, default=10, help="Steps that are timed. Default: 10.")
    parser.add_argument("--together", type=count, default=1, help="Steps of one measurement. Default: 1.")
    parser.add_argument("--json", type=file, help="Write the result to this file.")
    given = parser.parse_args()
    device = current_device()
    dist.init_process_group("gloo" if device.type == "cpu" else None)
    if device.type != "cpu":
        torch.accelerator.set_device_index(dist.get_node_local_rank())
        device = current_device()
    found = measure(given, device)
    if dist.get_rank() == 0:
        for what, (low, middle, high) in found["ratio of steps, quartiles"].items():
            step, without, compared = (found["milliseconds"][f"{name}, {what}"] for name in NAMES)
            print(
                f"{what:10} step {step:9.3f} ms, without checks {without:9.3f} ms; ratio {middle:.3f}, half of the "
                f"rounds {low:.3f} to {high:.3f}; comparison {compared:7.3f} ms, {compared / step:.2%} of the step"
            )
        if given.json is not None:
            sizes = {name: getattr(given, name) for name in ("seq_len", "hidden", "layers", "rounds", "together")}
            result = {"setting": setting(), "ranks": dist.get_world_size(), **sizes, **found}
            given.json.write_text(json.dumps(result, indent=1) + "\n")
    leave()


if __name__ == "__main__":
    end(main)
