"""Save or resume checkpoints of FSDP2 under Lightning, and generate: tests/integration/test_lightning.py.

python -m tests.support.lightning_checkpoint_ranks FOLDER RANKS EPOCHS [CHECKPOINT]

All ranks share each sequence. Rank 0 writes the weights, and the tokens that validations generate, to
`FOLDER/RANKS EPOCHS.pt`; all ranks write the checkpoint `FOLDER/RANKS EPOCHS.ckpt`. One rank trains without this
library.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from burst_portable.integrations.lightning import SequenceFSDPStrategy
from tests.support.forked import run_forked
from tests.support.lightning_ranks import Model, loader, trainer_of


class GeneratingModel(Model):
    """A model that generates in each validation, as loops that score completions do."""

    def __init__(self) -> None:
        super().__init__("fsdp")
        self.generated: list[Tensor] = []

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        super().validation_step(batch, index)
        sharded = getattr(self.trainer.strategy, "sharded", None)
        with sharded[0].paused() if sharded else nullcontext():
            prompts = batch["input_ids"][:, :5]
            self.generated.append(self.model.generate(prompts, max_new_tokens=6, do_sample=False, pad_token_id=0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # With its usual eps, Adam turns the rounding of gradients near zero into steps.
        return torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-4)


def main(rank: int, folder: Path, ranks: int, epochs: int, checkpoint: str | None) -> None:
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    if ranks > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
        os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # required but unused: the store is a file
        store = dist.FileStore(str(folder / f"store {ranks} {epochs}"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    strategy: Any = "auto" if ranks == 1 else SequenceFSDPStrategy(save_distributed_checkpoint=True)
    options: dict[str, Any] = {"max_epochs": epochs, "use_distributed_sampler": False}
    model, trainer = GeneratingModel(), trainer_of(folder, strategy, ranks, **options)
    trainer.fit(model, loader(8), loader(6), ckpt_path=checkpoint)
    trainer.save_checkpoint(folder / f"{ranks} {epochs}.ckpt")
    found = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    weights = {name: x.detach() for name, x in found.items()}
    if rank == 0:
        torch.save({"weights": weights, "generated": model.generated}, folder / f"{ranks} {epochs}.pt")
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    count = int(sys.argv[2])
    run_forked(count, main, Path(sys.argv[1]), count, int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else None)
