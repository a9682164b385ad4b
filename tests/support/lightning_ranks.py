"""Train with Lightning on ranks that share sequences, and on fewer devices: tests/integration/test_lightning.py.

python -m tests.support.lightning_ranks FOLDER SEQUENCES CASE...

Two ranks share each of the concurrent sequences. The last processes, one per sequence, train without this library: for
one sequence on one device, for more under DDP. Each writes what Lightning logs, the predicted logits and the weights.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torchmetrics import SumMetric

from burst_portable.errors import InputError, MismatchError
from burst_portable.integrations.lightning import SequenceFSDPStrategy, SequenceStrategy
from tests.support.forked import run_forked
from tests.support.models import checkpoint_activations, make
from tests.support.trainer_cases import pad, rows

SHARING = 2
CASES = ("fit", "fsdp", "own head", "checkpointed", "resumed", "manual")


class Model(L.LightningModule):
    """A module as in Lightning's guide. `kind`: one of `CASES`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.norms, self.gathered = kind, [], None
        self.labels = SumMetric()
        self.automatic_optimization = kind != "manual"
        self.model = make("llama")
        if kind == "checkpointed":
            checkpoint_activations(self.model)
        # It computes on GPUs only, and DDP rejects it on CPUs.
        self.norm, self.synchronized = (torch.nn.SyncBatchNorm(1, affine=False) if kind == "fsdp" else None), 0
        if kind == "own head":
            self.scale = torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def configure_model(self) -> None:
        if self.kind == "fsdp" and self.device_mesh is not None:
            if isinstance(self.model, FSDPModule):
                return  # Lightning calls this again before it validates
            for part in [*self.model.model.layers, self.model]:
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        if self.kind != "own head":
            return self.model(**batch).loss
        logits = self.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1] * self.scale
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
        return loss + 0.1 * (self.scale - 1) ** 2

    def training_step(self, batch: dict[str, Tensor], index: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("tokens", batch["attention_mask"].sum().double(), reduce_fx="sum", on_epoch=True, sync_dist=True)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.norms.append([p.grad.clone() for p in self.parameters()])
        optimizer.step()
        return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in self.parameters()]
        self.norms.append(torch.nn.utils.get_total_norm(grads).item())
        if self.norm is not None and dist.is_initialized():
            self.synchronized = dist.get_world_size(self.norm.process_group) - 1

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)
        self.labels.update((batch["labels"] != -100).sum())
        self.log("labels", self.labels)
        self.gathered = self.all_gather(batch["labels"].sum())

    def predict_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        return self.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[batch["labels"] != -100]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def trainer_of(folder: Path, strategy: Any, ranks: int, **options: Any) -> L.Trainer:
    if options.get("kind") == "manual":
        options |= {"gradient_clip_val": None, "accumulate_grad_batches": 1}
    options.pop("kind", None)
    usual = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "max_epochs": 2, "log_every_n_steps": 1}
    return L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **usual | options,
    )


def loader(count: int) -> DataLoader[Any]:
    return DataLoader(rows(count), batch_size=2, collate_fn=pad)  # type: ignore[arg-type]


def results(folder: Path, kind: str, shares: bool, ranks: int) -> dict[str, Any]:
    """Return the numbers of two epochs, a validation and a prediction, and the weights."""

    def strategy() -> Any:
        if not shares:
            return "auto" if ranks == 1 else "ddp"
        if kind == "fsdp":
            return SequenceFSDPStrategy(SHARING, save_distributed_checkpoint=False)
        return SequenceStrategy(None if ranks == SHARING else SHARING)

    # Lightning shuffles the rows of any distributed strategy, and not those of one device.
    options: dict[str, Any] = {"use_distributed_sampler": ranks > (SHARING if shares else 1)}
    model, trainer = Model(kind), trainer_of(folder, strategy(), ranks, kind=kind, **options)
    trainer.fit(model, loader(8), loader(6))
    if kind == "resumed":
        trainer.save_checkpoint(folder / "last.ckpt")
        assert not any("burst" in name for name in trainer.strategy.checkpoint_io.load_checkpoint(folder / "last.ckpt"))
        model, trainer = Model(kind), trainer_of(folder, strategy(), ranks, max_epochs=3, **options)
        trainer.fit(model, loader(8), loader(6), ckpt_path=str(folder / "last.ckpt"))
    logged = dict(trainer.callback_metrics)
    weights = {
        n: p.full_tensor() if isinstance(p, DTensor) else p.detach().clone() for n, p in model.named_parameters()
    }
    validated = trainer.validate(model, loader(6), verbose=False)
    predicted = trainer.predict(model, loader(6)) if kind != "fsdp" else []
    if kind != "fsdp":
        with torch.no_grad():  # the model is restored
            weights["logits"] = model.model(torch.arange(9).unsqueeze(0)).logits
    assert model.norm is None or model.norm.process_group is None
    found = {"norms": model.norms, "synchronized": model.synchronized, "logged": logged, "gathered": model.gathered}
    return found | {"validated": validated, "predicted": predicted, "weights": weights}


class Stream(IterableDataset[Any]):
    """A dataset that gives each process other rows, as a streaming one divided by rank."""

    def __iter__(self) -> Any:
        return iter(rows(8)[dist.get_rank() :: dist.get_world_size()])


def check_errors(folder: Path, ranks: int) -> None:
    """Check that ranks of a sequence never train on different rows."""

    def fit(strategy: Any, data: Any, model: Any = None, **options: Any) -> None:
        trainer_of(folder, strategy, ranks, **options).fit(model or Model("fit"), data)

    sampler = DistributedSampler(rows(8))  # type: ignore[arg-type]
    divided = DataLoader(rows(8), batch_size=2, collate_fn=pad, sampler=sampler)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"DistributedSampler gives .*got num_replicas=2, rank=.; allowed: num_repl"):
        fit(SequenceStrategy(), divided)
    with pytest.raises(MismatchError, match="rows of the batch"):
        fit(SequenceStrategy(), DataLoader(Stream(), batch_size=2, collate_fn=pad))
    with pytest.raises(InputError, match="multiple of cp_size; got cp_size=3 for 2 processes"):
        fit(SequenceStrategy(3), loader(4))
    with pytest.raises(InputError, match="no model of Transformers; got BoringModel"):
        fit(SequenceStrategy(), loader(4), BoringModel())
    with pytest.raises(InputError, match="no such model of Transformers; got teacher"):
        fit(SequenceStrategy(models=["model", "teacher"]), loader(4))
    with pytest.raises(InputError, match=r"shard parameters over all ranks; got model\..* on 1 of 2 ranks; in conf"):
        fit(SequenceFSDPStrategy(), loader(4))


def main(rank: int, folder: Path, sequences: int, names: list[str]) -> None:
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    shares = rank < SHARING * sequences
    size, local = (SHARING * sequences, rank) if shares else (sequences, rank - SHARING * sequences)
    if size > 1:
        os.environ |= {"RANK": str(local), "LOCAL_RANK": str(local), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
        os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # required but unused: the store is a file
        store = dist.FileStore(str(folder / f"store {shares}"), size)
        dist.init_process_group("gloo", store=store, rank=local, world_size=size)
    for name in names:
        torch.save(results(folder / f"{name} {shares}", name, shares, size), folder / f"{name} {rank}.pt")
    if shares and sequences == 1:
        check_errors(folder, size)
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    count = int(sys.argv[2])
    run_forked((SHARING + 1) * count, main, Path(sys.argv[1]), count, sys.argv[3:])
