"""Train a Llama 3 with torchtitan, each sequence sharded over several ranks.

torchrun --nproc-per-node 2 SCRIPT.py
torchrun --nproc-per-node 8 SCRIPT.py --config llama3_8b --assets FOLDER --seq-len 131072 --cp-size 8

torchtitan needs GPUs. Without options, a small model with random weights learns bytes of an English text. --config is
a function of torchtitan.models.llama3.config_registry; its model, data and optimizer are used.
"""

import argparse
import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import OverrideConfig
from torchtitan.models.llama3 import config_registry
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from burst_portable.config import read_launcher_env

OVERRIDE = "burst_portable.integrations.torchtitan.attention"


class Bytes(BaseTokenizer):
    """Takes bytes as tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **unused: Any) -> None:
        super().__init__()

    def encode(self, text: str, **unused: Any) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], **unused: Any) -> str:
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return 256


class HelpTexts(BaseDataLoader):
    """Yields rows of the English text that comes with Python, equal on all ranks of a sequence."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, tokenizer: Bytes, seq_len: int, local_batch_size: int, **more: Any) -> None:
        tokens = torch.tensor(tokenizer.encode("\n".join(pydoc_data.topics.topics.values())))
        rows = tokens[: len(tokens) // (seq_len + 1) * (seq_len + 1)].view(-1, seq_len + 1)
        self.batches = rows[more["dp_rank"] :: more["dp_world_size"]].split(local_batch_size)
        self.positions = torch.arange(seq_len)  # they restart at each document of a packed row

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for batch in self.batches:
            yield {"input": batch[:, :-1], "positions": self.positions.repeat(len(batch), 1)}, batch[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def configured(name: str, assets: str | None, seq_len: int, steps: int, batch: int, cp_size: int) -> Any:
    """Return a configuration of torchtitan with the attention of burst_portable."""
    config = getattr(config_registry, name)()
    config.override = OverrideConfig(imports=[OVERRIDE])  # the one argument
    config.parallelism.context_parallel_degree = cp_size
    config.parallelism.spmd_backend = "full_dtensor"  # "spmd_types" needs a torch after 2.13
    config.training.disable_cuda_graphs = True  # the documents of a batch are read on the host
    config.training.seq_len, config.training.steps, config.training.local_batch_size = seq_len, steps, batch
    config.validator.enable = config.checkpoint.enable = False
    if assets is None:
        config.tokenizer, config.dataloader = Bytes.Config(), HelpTexts.Config()
    else:
        config.hf_assets_path = assets
    return config


def tokens(text: str) -> int:
    """Return a number of tokens: an integer, or digits with k (times 1,024) or m (times 1,048,576) after them."""
    factor = {"k": 1 << 10, "m": 1 << 20}.get(text[-1:].lower())
    return int(text) if factor is None else int(text[:-1]) * factor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="llama3_debugmodel", help="name of a configuration of torchtitan")
    parser.add_argument("--assets", help="folder of its tokenizer; default: bytes of English that comes with Python")
    parser.add_argument("--seq-len", type=tokens, default=2048, help="tokens of a sequence, as 512 or 128k")
    parser.add_argument("--steps", type=int, default=10, help="number of optimizer steps")
    parser.add_argument("--batch", type=int, default=1, help="sequences per step and group of ranks")
    parser.add_argument("--cp-size", type=int, help="ranks that share a sequence; default: all")
    options = vars(parser.parse_args())
    if not torch.accelerator.is_available():
        parser.exit(2, f"{parser.prog}: torchtitan needs GPUs\n")
    launcher = read_launcher_env()
    if launcher is None:
        parser.exit(2, f"{parser.prog}: start it with torchrun\n")
    init_logger()  # the losses are log lines
    cp_size = options.pop("cp_size") or launcher.world_size
    trainer = Trainer(configured(options.pop("config"), cp_size=cp_size, **options))
    trainer.train()
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
