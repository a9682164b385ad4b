"""Train with axolotl's trainer on one process, or on two ranks that share sequences by the plugin.

python -m tests.support.axolotl_ranks RANKS FILE

Rank 0 writes the losses, norms of gradients, the loss of an evaluation and the counted tokens, by case, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState
from axolotl.core.trainers.base import AxolotlTrainer
from axolotl.core.training_args import AxolotlTrainingArguments
from axolotl.integrations.base import PluginManager
from axolotl.monkeypatch.data.batch_dataset_fetcher import apply_multipack_dataloader_patch
from axolotl.utils.collators.batching import DataCollatorForSeq2Seq, V2BatchSamplerDataCollatorForSeq2Seq
from axolotl.utils.dict import DictDefault
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.support.forked import run_forked
from tests.support.models import make
from tests.support.trainer_cases import rows


def results(packed: bool, ranks: int) -> list[float]:
    """Return numbers of four optimizer steps, with padded or packed rows."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    words = Tokenizer(models.WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", unk_token="0")
    examples = [
        row | {"attention_mask": [1] * (n := len(row["input_ids"])), "position_ids": list(range(n)), "length": n}
        for row in rows(12) * 2
    ]
    collator = (V2BatchSamplerDataCollatorForSeq2Seq if packed else DataCollatorForSeq2Seq)(tokenizer)
    manager, cfg = PluginManager.get_instance(), DictDefault({"sequence_parallelism": {"cp_size": ranks}})
    options = manager.get_training_args(cfg) if ranks > 1 else {}
    cls: Any = manager.get_trainer_cls(cfg) if ranks > 1 else AxolotlTrainer
    args = AxolotlTrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=4,
        per_device_train_batch_size=1 if packed else 2,
        gradient_accumulation_steps=2,
        average_tokens_across_devices=False,  # as axolotl sets it
        max_grad_norm=0.5,
        learning_rate=1e-2,
        adam_epsilon=1e-4,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        remove_unused_columns=not packed,
        sample_packing=packed,
        eval_sample_packing=packed,
        sample_packing_drop_attention_mask=packed,  # without a mask, Transformers finds the documents on one device
        sample_packing_bin_size=200,
        sample_packing_group_size=100000,
        sample_packing_efficiency=1.0,
        max_seq_length=64,
        dataset_num_proc=1,
        include_tkps=True,
        **options,
    )
    trainer: Any = cls(
        model=make("llama", torch.float32),
        args=args,
        train_dataset=Dataset.from_list(examples),
        eval_dataset=Dataset.from_list(examples[:8]),
        data_collator=collator,
        eval_data_collator=collator,
        processing_class=tokenizer,
    )
    trainer.axolotl_cfg = cfg
    trainer.train()
    logs = [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]
    counted = [float(x) for x in trainer.state.tokens.values()]
    return [*(x for log in logs for x in log), trainer.evaluate()["eval_loss"], *counted]


def main(rank: int, ranks: int, file: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    if ranks > 1:
        os.environ |= {"MASTER_PORT": "1", "LOCAL_WORLD_SIZE": str(ranks)}  # required but unused: the store is a file
        store = dist.FileStore(f"{file}.store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        PluginManager.get_instance().register("burst_portable.integrations.axolotl.SequencePlugin")
    os.environ["ACCELERATE_USE_CPU"] = "true"  # axolotl asks accelerate for the ranks before its arguments do
    PartialState._reset_state()
    PartialState(cpu=True)
    padded = results(packed=False, ranks=ranks)
    apply_multipack_dataloader_patch()
    found = {"padded": padded, "packed": results(packed=True, ranks=ranks)}
    if rank == 0:
        Path(file).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    run_forked(int(sys.argv[1]), main, int(sys.argv[1]), sys.argv[2])
