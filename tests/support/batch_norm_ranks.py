"""Train an own head with a SyncBatchNorm on ranks that share sequences: tests/integrations/test_batch_norms.py.

python -m tests.support.batch_norm_ranks FOLDER RANKS

Two ranks share a sequence. Each rank writes the numbers of a step, and those of one device with all sequences.
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from transformers import TrainingArguments

from burst_portable.integrations.accelerate import SequenceParallelism
from burst_portable.integrations.trainer import SequenceTrainer
from tests.support.forked import run_forked
from tests.support.models import make, tokens
from tests.support.trainer_cases import forget_accelerator

SHARING = 2


class HostSyncBatchNorm(nn.SyncBatchNorm):
    """Compute on the host what torch's own computes on GPUs only: statistics of the rows of all ranks of its group."""

    def forward(self, x: Tensor) -> Tensor:
        group = self.process_group or dist.group.WORLD
        self.ranks = dist.get_world_size(group)
        count = len(x) * self.ranks
        mean = all_reduce(x.sum(0), "sum", group) / count
        var = all_reduce((x - mean).square().sum(0), "sum", group) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1), self.momentum)
        return (x - mean) * (var + self.eps).rsqrt() * self.weight + self.bias


class Scored(nn.Module):
    """A model of Transformers, and a head with a batch norm over all tokens."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.body = make("llama").model
        size = self.body.config.hidden_size
        torch.manual_seed(1)
        self.head = nn.Linear(size, 1, dtype=torch.float64)
        self.norm = norm(size, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        states = self.body(input_ids=ids).last_hidden_state
        scores = self.head(self.norm(states.flatten(0, 1)).tanh())
        return (scores - ids.reshape(-1, 1) / 64).square().mean()


def numbers(model: Scored, ids: Tensor, ranks: int = 1) -> dict[str, Tensor]:
    """Return the mean and variance of the norm after a step, and the gradients, averaged as by DDP."""
    model(ids).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for gradient in found.values() if ranks > 1 else ():
        dist.all_reduce(gradient.div_(ranks))
    return found | dict(model.norm.named_buffers())


def on_ranks(ids: Tensor, ranks: int, group: Any = None) -> dict[str, Tensor]:
    """Return the numbers of a model that an `Accelerator` shards. `group`: set by the program for its norm."""
    forget_accelerator()
    parallelism = SequenceParallelism(SHARING)
    accelerator = Accelerator(cpu=True, parallelism_config=parallelism)
    model = Scored(HostSyncBatchNorm)
    model.norm.process_group = group
    with parallelism.parallelize(model) as sharded:
        assert (sharded.mesh.size, accelerator.num_processes) == (SHARING, ranks)
        if group is None:
            model = copy.deepcopy(model)  # as for an average of weights; a group cannot be copied
        return numbers(model, ids, ranks)


def sizes_of_groups(folder: Path, ids: Tensor) -> list[int]:
    """Return the ranks that the norm of a model uses: in two trainers one after the other, and then by itself."""
    model, found = Scored(HostSyncBatchNorm), []
    for size in (SHARING, 1):
        forget_accelerator()
        usual = {"use_cpu": True, "report_to": "none", "parallelism_config": SequenceParallelism(size)}
        trainer = SequenceTrainer(model, TrainingArguments(str(folder), **usual))
        model(ids)
        found.append(model.norm.ranks)
    assert trainer.sharded is not None
    trainer.sharded.undo()
    model(ids)
    return [*found, model.norm.ranks]


def main(rank: int, folder: Path, ranks: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # required but unused, because the store is a file
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    batches = [tokens(batch=2, length=9, seed=seed) for seed in range(ranks // SHARING)]
    mine, everyone = batches[rank // SHARING], dist.new_group(list(range(ranks)))
    found = {
        "expected": numbers(Scored(nn.BatchNorm1d), torch.cat(batches)),
        "shared": on_ranks(mine, ranks),
        "own group": on_ranks(mine, ranks, everyone),
        "trainers": sizes_of_groups(folder, mine),
    }
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _, path, count = sys.argv
    run_forked(int(count), main, Path(path), int(count))
