"""Train a small Llama with DeepSpeed's ZeRO, each sequence sharded over all ranks.

Any number of ranks gives the same losses. This example was run on CPUs, where DeepSpeed compiles C++ in its first run.

torchrun --nproc-per-node 1 examples/train_with_deepspeed.py
torchrun --nproc-per-node 2 examples/train_with_deepspeed.py --stage 2
"""

import argparse
import pydoc_data.topics

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from burst_portable.integrations.deepspeed import SequenceUnit

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def texts(count: int, length: int) -> list[dict[str, Tensor]]:
    """Return texts as bytes, each a row of `length` tokens with the labels of one device."""
    found = [text.encode() for text in sorted(pydoc_data.topics.topics.values()) if len(text.encode()) >= length]
    rows = [torch.tensor(list(text[:length])) for text in found[:count]]
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=range(4), default=3, help="stage of ZeRO. Default: 3")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **SIZES))
    config = {
        "train_micro_batch_size_per_gpu": 2,  # rows per sequence group
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": options.stage},
        "zero_allow_untested_optimizer": True,  # torch's AdamW; that of DeepSpeed is compiled
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        mpu=SequenceUnit(model),  # all ranks share each sequence; cp_size=4: groups of 4
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        training_data=texts(12, 301),
        config=config,
    )
    losses = []
    for batch in loader:
        loss = engine(**{name: x.to(engine.device) for name, x in batch.items()}).loss  # the value of one device
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print("losses:", *(f"{loss:.6f}" for loss in losses))
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
