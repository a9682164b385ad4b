"""Train a small Llama with Transformers' Trainer, each sequence sharded over all ranks.

Any number of ranks gives the same losses.

python examples/train_with_trainer.py
torchrun --nproc-per-node 2 examples/train_with_trainer.py
"""

import argparse
import pydoc_data.topics
import tempfile

import torch.distributed as dist
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from burst_portable.integrations.accelerate import SequenceParallelism
from burst_portable.integrations.trainer import SequenceTrainer

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def documents(count: int, length: int) -> list[dict[str, list[int]]]:
    """Return texts of different lengths as bytes. The collator packs a batch of them into one row."""
    texts = [text.encode() for text in sorted(pydoc_data.topics.topics.values())]
    return [{"input_ids": list(text[: length + 7 * i])} for i, text in enumerate(texts[:count])]


def settings(folder: str, batch: int, parallelism: SequenceParallelism | None) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder,
        parallelism_config=parallelism,
        max_steps=3,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_find_unused_parameters=False,
    )


def train(parallelism: SequenceParallelism | None, batch: int = 3, held_out: int = 11) -> list[float]:
    """Return the losses of three training steps and of the evaluation. None: without this library."""
    set_seed(0)
    trainer_class = Trainer if parallelism is None else SequenceTrainer
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(
            model=LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **SIZES)),
            args=settings(folder, batch, parallelism),
            data_collator=DataCollatorWithFlattening(),
            train_dataset=documents(24, 64),
            eval_dataset=documents(held_out, 50),
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return [*losses, trainer.evaluate()["eval_loss"]]


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    losses = train(SequenceParallelism())  # all processes share each sequence
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("losses:", *(f"{loss:.6f}" for loss in losses))
    if dist.is_initialized():
        dist.destroy_process_group()
