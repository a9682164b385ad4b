"""Train a causal language model by a loop with FSDP2, each sequence sharded over all ranks.

torchrun --nproc-per-node 2 SCRIPT.py
torchrun --nproc-per-node 8 SCRIPT.py --model FOLDER --text BOOK.txt --seq-len 131072

Without options, a small Llama with random weights learns bytes of an English text.
"""

import argparse
import pydoc_data.topics
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    set_seed,
)

import burst_portable as bp
from burst_portable.integrations.transformers import parallelize

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def read_rows(name: str | None, text: Path | None, seq_len: int) -> list[Tensor]:
    """Return a text as rows of `seq_len` tokens: those of the model's tokenizer, or bytes."""
    content = text.read_text(encoding="utf-8") if text else "\n".join(pydoc_data.topics.topics.values())
    if name is None:
        tokens = torch.tensor(list(content.encode()))
    else:
        tokens = AutoTokenizer.from_pretrained(name)(content, return_tensors="pt")["input_ids"][0]
    rows = list(tokens[: len(tokens) // seq_len * seq_len].split(seq_len))
    if not rows:
        raise SystemExit(f"the text has {len(tokens)} tokens, fewer than --seq-len {seq_len}")
    return rows


def load(name: str | None) -> PreTrainedModel:
    """Return the model of a checkpoint in float32; without a name, a small Llama with random weights."""
    set_seed(0)
    if name is None:
        return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **SIZES))
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    return model


def tokens(text: str) -> int:
    """Return a number of tokens: an integer, or digits with k (times 1,024) or m (times 1,048,576) after them."""
    factor = {"k": 1 << 10, "m": 1 << 20}.get(text[-1:].lower())
    return int(text) if factor is None else int(text[:-1]) * factor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hub ID of a model; default: a small Llama with random weights")
    parser.add_argument("--text", type=Path, help="text file; default: English that comes with Python")
    parser.add_argument("--seq-len", type=tokens, default=512, help="tokens of a sequence, as 512 or 128k")
    parser.add_argument("--steps", type=int, default=10, help="number of optimizer steps")
    parser.add_argument("--batch", type=int, default=1, help="sequences per step")
    parser.add_argument("--save", default="trained_with_loop", metavar="FOLDER", help="where to write the model")
    options = parser.parse_args()

    if not dist.is_torchelastic_launched():
        parser.exit(2, f"{parser.prog}: start it with torchrun\n")
    has_device = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if has_device else torch.device("cpu")
    assert device is not None
    dist.init_process_group()
    if has_device:
        torch.accelerator.set_device_index(dist.get_node_local_rank())
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("sequence",))

    rows = read_rows(options.model, options.text, options.seq_len)
    model = load(options.model)
    sharded = parallelize(model, bp.Mesh.from_device_mesh(mesh))
    model.gradient_checkpointing_enable()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if has_device else MixedPrecisionPolicy()
    for part in [*model.base_model.layers, model]:
        fully_shard(part, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5 if options.model else 3e-3)
    model.train()
    for step in range(options.steps):
        places = range(step * options.batch, (step + 1) * options.batch)
        batch = torch.stack([rows[place % len(rows)] for place in places]).to(device)  # equal on all ranks
        # This rank's part of the mean over all tokens. With 128K tokens and more, the logits take the most memory: see
        # examples/train_hugging_face_with_fsdp.py of burst_portable, which computes the loss in chunks.
        loss = model(**sharded.shard(batch)).loss
        (loss * ranks).backward()  # FSDP averages over the ranks; parts of a mean are added
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = bp.all_reduce(loss.detach(), sharded.mesh).item()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {total:.6f}", flush=True)
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    sharded.undo()
    if dist.get_rank() == 0:  # only rank 0 has the weights
        model.save_pretrained(options.save, state_dict=weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
