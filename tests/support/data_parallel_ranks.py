"""Train under DDP, FSDP2 and Trainer: the ranks of tests/integration/test_data_parallel.py.

Two sequences are trained at a time, each over two ranks.

python -m tests.support.data_parallel_ranks FOLDER

Each rank writes by case the difference of its gradients from those of one device, and the results of Trainer.
"""

from __future__ import annotations

import copy
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from burst_portable import Mesh
from burst_portable.config import Config
from burst_portable.errors import InputError
from burst_portable.integrations.accelerate import SequenceParallelism
from burst_portable.integrations.transformers import ShardedModel, all_reduce_gradients, parallelize
from tests.support.forked import run_forked
from tests.support.models import checkpoint_activations, make, on_one_device, tokens
from tests.support.trainer_cases import USUAL, accelerate_loop, forget_accelerator, restored_draws, results

TRAIN = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "train_with_trainer.py"))["train"]
DATA, SEQUENCE = 2, 2


def batches() -> tuple[Tensor, Tensor]:
    """Return ids and labels of shape [data, 2, 47]. The second data rank has fewer labels."""
    ids = torch.stack([tokens(seed=1), tokens(seed=2)])
    labels = ids.clone()
    labels[1, :, :30] = -100
    return ids, labels


def backward(model: Any, sharded: ShardedModel, data: DeviceMesh, averaged: int) -> None:
    """Run backward as a trainer does.

    The loss is divided by the labels of all data ranks and multiplied by the number of ranks that average gradients.
    """
    ids, labels = (x[data.get_local_rank()] for x in batches())
    inputs = sharded.shard(ids, labels)
    dist.all_reduce(inputs["num_items_in_batch"], group=data.get_group())
    (model(**inputs).loss * averaged).backward()


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}


def ddp_gradients(model: Any, mesh: Mesh, grid: DeviceMesh) -> dict[str, Tensor]:
    sharded = parallelize(model, mesh)
    wrapped = DistributedDataParallel(model)
    backward(wrapped, sharded, grid["data"], averaged=grid.size())
    return gradients(model)


def fsdp_gradients(model: Any, mesh: Mesh, grid: DeviceMesh) -> dict[str, Tensor]:
    """Return gradients if FSDP shards parameters over all ranks."""
    sharded = parallelize(model, mesh)
    everybody = grid["data", "sequence"]._flatten()
    for layer in model.model.layers:
        fully_shard(layer, mesh=everybody)
    fully_shard(model, mesh=everybody)
    backward(model, sharded, grid["data"], averaged=grid.size())
    with pytest.raises(InputError, match="already"):
        all_reduce_gradients(model.parameters(), mesh)
    all_reduce_gradients(
        model.parameters(), Mesh.single()
    )  # no other rank shares such a sequence, so its gradients stay unchanged
    return gradients(model)


def fsdp_accumulated_gradients(model: Any, mesh: Mesh, grid: DeviceMesh) -> dict[str, Tensor]:
    """Return gradients if each data rank calls the model once per row, and FSDP sums them in the last call."""
    sharded = parallelize(model, mesh)
    for part in [*model.model.layers, model]:
        fully_shard(part, mesh=grid["data", "sequence"]._flatten())
    rows = (x[grid["data"].get_local_rank()].split(1) for x in batches())
    step = [sharded.shard(ids, labels) for ids, labels in zip(*rows, strict=True)]
    labels = sum(inputs["num_items_in_batch"] for inputs in step)
    dist.all_reduce(labels, group=grid["data"].get_group())
    for number, inputs in enumerate(step, 1):
        model.set_requires_gradient_sync(number == len(step))
        (model(**inputs | {"num_items_in_batch": labels}).loss * grid.size()).backward()
    return gradients(model)


def fsdp_over_data_gradients(model: Any, mesh: Mesh, grid: DeviceMesh) -> dict[str, Tensor]:
    """Return gradients if FSDP shards parameters over the data axis only, and they are summed over the sequence."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=grid["data"])
    fully_shard(model, mesh=grid["data"])
    sharded = parallelize(model, mesh)
    checkpoint_activations(model)
    backward(model, sharded, grid["data"], averaged=DATA)
    all_reduce_gradients(model.parameters(), mesh)
    return gradients(model)


def fsdp_of_accelerate_gradients(model: Any, mesh: Mesh, grid: DeviceMesh) -> dict[str, Tensor]:
    """Return gradients if FSDP2 shards parameters over the axes that accelerate takes, which it does on devices only.

    The loss is scaled as in Trainer: it counts the labels of all ranks, which have each row once per sequence rank.
    """
    for sizes in ({"dp_shard_size": DATA}, {"dp_replicate_size": DATA}):
        parallelism = SequenceParallelism(SEQUENCE, **sizes)
        axes = parallelism.get_device_mesh("cpu")
        copied = copy.deepcopy(model)
        parallelism.parallelize(copied)
        fully_shard(copied, mesh=axes[tuple(parallelism.fsdp_dim_names)])
        ids, labels = (x[axes[parallelism.dp_dim_names[0]].get_local_rank()] for x in batches())
        count = (labels[:, 1:] != -100).sum()
        dist.all_reduce(count)
        (copied(input_ids=ids, labels=labels, num_items_in_batch=count).loss * dist.get_world_size()).backward()
        found = gradients(copied)
        if "dp_shard_size" in sizes:
            sharded = found
    torch.testing.assert_close(found, sharded, rtol=1e-6, atol=1e-9)
    return found


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    # Set by torchrun, and read by accelerate.
    size = str(DATA * SEQUENCE)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # required but unused, because the store is a file
    store = dist.FileStore(str(folder / "store"), DATA * SEQUENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=DATA * SEQUENCE)
    grid = init_device_mesh("cpu", (DATA, SEQUENCE), mesh_dim_names=("data", "sequence"))
    mesh = Mesh.from_device_mesh(grid, "sequence", config=Config(timeout=60))
    model = make("mistral")
    ids, labels = (x.flatten(0, 1) for x in batches())
    expected = on_one_device(model, ids, labels).gradients
    found: dict[str, Any] = {}
    cases = (ddp_gradients, fsdp_gradients, fsdp_accumulated_gradients, fsdp_over_data_gradients)
    for case in (*cases, fsdp_of_accelerate_gradients):
        got = case(copy.deepcopy(model), mesh, grid)
        assert got.keys() == expected.keys()
        apart = {name: ((got[name] - g).norm() / g.norm()).item() for name, g in expected.items()}
        found[case.__name__] = max(apart.values())
    found["one_sequence"] = TRAIN(SequenceParallelism())
    forget_accelerator()
    found["two_sequences"] = TRAIN(SequenceParallelism(SEQUENCE), held_out=12)
    with pytest.raises(InputError, match=r"use SequenceTrainer \(integrations.trainer\)"):
        accelerate_loop(SequenceParallelism(), is_sharded=False)
    torch.save(accelerate_loop(SequenceParallelism()), folder / f"accelerate {rank}.pt")
    for name, options in USUAL.items():
        torch.save(results(folder / name, **options), folder / f"{name} {rank}.pt")
    found["restored draws"] = restored_draws(folder / "restored", rank)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_forked(DATA * SEQUENCE, main, Path(sys.argv[1]))
