"""Train with DeepSpeed on ranks that share sequences: tests/integration/test_deepspeed.py.

python -m tests.support.deepspeed_ranks FOLDER SEQUENCES [classifier]

Two ranks share each of the concurrent sequences. Every rank compares the losses, norms and weights of each ZeRO stage
with those of a loop on one device.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaForSequenceClassification

from burst_portable.errors import InputError, MismatchError
from burst_portable.integrations.deepspeed import SequenceUnit
from tests.support.forked import run_forked
from tests.support.models import checkpoint_activations, make
from tests.support.trainer_cases import pad, rows

SHARING, ACCUMULATED, STEPS = 2, 2, 3


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return rows(12)[index]


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": ACCUMULATED,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def model_of(*, classifies: bool) -> Any:
    model = make("llama", torch.float32)
    if not classifies:
        return model
    torch.manual_seed(0)
    model.config.pad_token_id, model.config.num_labels = 0, 3
    return LlamaForSequenceClassification(model.config).train()


def collate(examples: list[Any], *, classifies: bool) -> dict[str, Tensor]:
    batch = pad(examples)
    return batch | {"labels": batch["input_ids"][:, 0] % 3} if classifies else batch


def parameters_of(model: Any) -> dict[str, Tensor]:
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def results_alone(model: Any, order: list[list[dict[str, Tensor]]]) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and weights of a loop over steps, each with batches whose gradients are averaged."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in order:
        for batch in step:
            loss = model(**batch).loss
            (loss / len(step)).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def train(stage: int, *, recompute: bool = False, classifies: bool = False) -> None:
    """Train a model with DeepSpeed, and compare it with one device."""
    model = model_of(classifies=classifies)
    if recompute:
        checkpoint_activations(model)
    engine, *_ = deepspeed.initialize(
        model=model,
        mpu=SequenceUnit(model, SHARING),
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        config=config(stage),
    )
    sequences = engine.mpu.get_data_parallel_world_size()
    losses, given = [], []  # type: ignore[var-annotated]
    collator = partial(collate, classifies=classifies)
    batches = iter(engine.deepspeed_io(Rows(), collate_fn=collator, num_local_io_workers=0))  # as training_data
    for _ in range(STEPS * ACCUMULATED):
        batch = next(batches)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, batch)
        given += gathered[::SHARING]
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    each = sequences * ACCUMULATED
    alone = model_of(classifies=classifies)
    expected, weights = results_alone(alone, [given[i : i + each] for i in range(0, len(given), each)])
    assert losses == pytest.approx(expected[engine.mpu.get_data_parallel_rank() :: sequences], rel=2e-5)
    torch.testing.assert_close(parameters_of(engine.module), weights, rtol=2e-5, atol=2e-6)
    with pytest.raises(MismatchError, match="rows of the batch"):
        engine(**{k: x + dist.get_rank() * (k == "input_ids") for k, x in batch.items()})
    engine.destroy()


def main(rank: int, folder: Path, sequences: int, classifies: bool) -> None:
    torch.set_num_threads(1)
    size = SHARING * sequences
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # required but unused: the store is a file
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
    for stage in (1, 3) if classifies else range(4):
        train(stage, recompute=stage == 3 and not classifies, classifies=classifies)
    with pytest.raises(InputError, match="multiple of cp_size; got cp_size=3 for"):
        SequenceUnit(make("llama"), 3)
    with pytest.raises(InputError, match="model of Transformers; got Linear"):
        SequenceUnit(torch.nn.Linear(2, 2))
    dist.destroy_process_group()


if __name__ == "__main__":
    count = int(sys.argv[2])
    run_forked(SHARING * count, main, Path(sys.argv[1]), count, "classifier" in sys.argv)
