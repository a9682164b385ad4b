"""Train a Hugging Face model with FSDP2, each sequence sharded over all ranks. Any number of ranks gives equal losses.

torchrun --nproc-per-node 2 examples/train_hugging_face_with_fsdp.py                      (a small Llama over bytes)
torchrun --nproc-per-node 8 examples/train_hugging_face_with_fsdp.py --model FOLDER --text BOOK --seq-len 512k --steps 1

FSDP2 shards weights, gradients and optimizer states over the same ranks that share the sequence. Layers are recomputed
in the backward pass, and so are the logits, of --loss-rows tokens at a time. For more tokens than the
max_position_embeddings of a checkpoint, edit its config.json first: docs/hugging_face.md, "Longer contexts". Each step
takes new tokens of the text. This example was run on CPUs.
"""

import argparse
import os
import pydoc_data.topics
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint as recompute_in_backward
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import burst_portable as bp
from burst_portable.integrations.transformers import parallelize

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def summed_loss(hidden: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    logits = linear(hidden, weight.to(hidden.dtype))
    return cross_entropy(logits.float(), labels, reduction="sum")


class LossInChunks(torch.nn.Module):
    """A causal language model that returns its loss, and holds the logits of `rows` tokens at a time.

    It is for models whose logits are the product of `lm_head` and the last hidden state, without a softcap or a scale.
    """

    def __init__(self, model: PreTrainedModel, rows: int) -> None:
        super().__init__()
        self.model, self.rows = model, rows

    def forward(self, shift_labels: Tensor, num_items_in_batch: Tensor, labels: Tensor, **inputs: Tensor) -> Tensor:
        hidden = self.model.base_model(**inputs).last_hidden_state.flatten(0, 1)
        weight = self.model.lm_head.weight.float()  # so that the gradients of the chunks are added in float32
        chunks = zip(hidden.split(self.rows), shift_labels.flatten().split(self.rows), strict=True)
        losses = [recompute_in_backward(summed_loss, *chunk, weight, use_reentrant=False) for chunk in chunks]
        return sum(losses) / num_items_in_batch


def read_tokens(checkpoint: str | None, text: str, seq_len: int, steps: int) -> torch.Tensor:
    """Return the tokens of a text: bytes without a checkpoint. Exit if they, or the model's positions, are too few."""
    if checkpoint is None:
        tokens = torch.tensor(list(text.encode()))
    else:
        positions = getattr(AutoConfig.from_pretrained(checkpoint), "max_position_embeddings", None)
        if positions is not None and seq_len > positions:
            hint = f"edit {checkpoint}/config.json as docs/hugging_face.md, 'Longer contexts', shows"
            raise SystemExit(f"--seq-len is {seq_len}, but max_position_embeddings is {positions}; {hint}")
        tokens = AutoTokenizer.from_pretrained(checkpoint)(text, return_tensors="pt")["input_ids"][0]
    if len(tokens) < seq_len * steps:
        raise SystemExit(f"the text has {len(tokens)} tokens; {steps} steps of {seq_len} need {seq_len * steps}")
    return tokens


def load(checkpoint: str | None) -> PreTrainedModel:
    """Return the model of a checkpoint in float32; without a checkpoint, a small Llama with random weights."""
    if checkpoint is None:
        torch.manual_seed(0)  # equal weights on every rank before FSDP shards them
        return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **SIZES))
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def train(checkpoint: str | None, text: str, seq_len: int, steps: int, rows: int, folder: str | None) -> list[float]:
    """Return the loss of each step, the mean over all tokens. Write the weights to a folder, if one is named."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    ranks = dist.get_world_size()
    grid = init_device_mesh(device.type, (ranks,), mesh_dim_names=("sequence",))
    tokens = read_tokens(checkpoint, text, seq_len, steps)  # first, since a large model takes minutes to load
    model = load(checkpoint)
    sharded = parallelize(model, bp.Mesh.from_device_mesh(grid))
    # The first name is that of newer releases of Transformers.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    # Matrix products in bfloat16 on accelerators; float32 weights and gradients.
    wide = MixedPrecisionPolicy()
    policy = wide if device.type == "cpu" else MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model_with_loss = LossInChunks(model, rows)
    for part in [*model.base_model.layers, model_with_loss]:  # fully_shard moves each part to the device
        fully_shard(part, mesh=grid, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 if checkpoint is None else 1e-5)
    model.train()
    losses = []
    for step in range(steps):
        input_ids = tokens[step * seq_len : (step + 1) * seq_len].unsqueeze(0).to(device)
        loss = model_with_loss(**sharded.shard(input_ids))  # this rank's part of the mean over all tokens
        (loss * ranks).backward()  # FSDP averages over the ranks; parts of a mean are added
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(bp.all_reduce(loss.detach(), sharded.mesh).item())
    if folder:
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        sharded.undo()
        if dist.get_rank() == 0:  # only rank 0 has the weights
            model.save_pretrained(folder, state_dict=weights)
    return losses


def length(text: str) -> int:
    """Parse a number of tokens: digits, or digits with k (times 1,024) or m (times 1,048,576)."""
    factor = {"k": 1 << 10, "m": 1 << 20}.get(text[-1:].lower(), 1)
    return int(text if factor == 1 else text[:-1]) * factor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a checkpoint; default: a small Llama with random weights")
    parser.add_argument("--text", type=Path, help="text file; default: English that comes with Python")
    parser.add_argument("--seq-len", type=length, default=509, help="tokens of a sequence, such as 4096 or 512k")
    parser.add_argument("--steps", type=int, default=3, help="number of sequences")
    parser.add_argument("--loss-rows", type=int, default=2048, help="tokens whose logits are in memory at a time")
    parser.add_argument("--save", metavar="FOLDER", help="where to write the weights after the last step")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.exit(2, f"{parser.prog}: start it with torchrun\n")
    text = options.text.read_text() if options.text else "\n".join(pydoc_data.topics.topics.values())
    dist.init_process_group()
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    losses = train(options.model, text, options.seq_len, options.steps, options.loss_rows, options.save)
    if dist.get_rank() == 0:
        print("losses:", *(f"{loss:.6f}" for loss in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
