"""Train a Hugging Face model over three axes: data x sequence x tensor. Any grid gives equal losses.

torchrun --nproc-per-node 4 examples/train_with_tensor_parallelism.py --tensor 2                 (sequence 2 x tensor 2)
torchrun --nproc-per-node 8 examples/train_with_tensor_parallelism.py --data 2 --tensor 2 --model FOLDER --text BOOK

Heads and the features between them are sharded over the axis "tensor", by the plan that Transformers has for the model
(`model.tp_plan`). The tokens of each sequence are sharded over "sequence", and each rank of that axis computes
attention with its part of the heads. FSDP2 shards weights over "data" and "sequence", and averages their gradients.
The remaining ranks are those of "sequence". This example was run on CPUs.
"""

import argparse
import os
import pydoc_data.topics
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import burst_portable as bp
from burst_portable.integrations.transformers import parallelize

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}


def load(checkpoint: str | None) -> PreTrainedModel:
    """Return the model of a checkpoint in float32; without a checkpoint, a small Llama with random weights."""
    if checkpoint is None:
        torch.manual_seed(0)  # equal weights on every rank before they are sharded
        return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **SIZES))
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def read_tokens(checkpoint: str | None, text: str) -> torch.Tensor:
    """Return the tokens of a text: bytes without a checkpoint."""
    if checkpoint is None:
        return torch.tensor(list(text.encode()))
    return AutoTokenizer.from_pretrained(checkpoint)(text, return_tensors="pt")["input_ids"][0]


def shard_heads(model: PreTrainedModel, axis: DeviceMesh) -> None:
    """Shard weights over an axis by Transformers' plan for the model: names of layers, with * for numbers."""
    styles = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
    }
    if unknown := set(model.tp_plan.values()) - set(styles):
        raise SystemExit(f"{type(model).__name__} needs styles that this example has not: {', '.join(sorted(unknown))}")
    if model.config.num_key_value_heads % axis.size():
        raise SystemExit(f"--tensor {axis.size()} does not divide {model.config.num_key_value_heads} K/V heads")
    parallelize_module(model, axis, {name: styles[style] for name, style in model.tp_plan.items()})


def train(options: argparse.Namespace, text: str) -> list[float]:
    """Return the loss of each step: the mean over all tokens of all sequences."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    sizes = (options.data, dist.get_world_size() // options.data // options.tensor, options.tensor)
    grid = init_device_mesh(device.type, sizes, mesh_dim_names=("data", "sequence", "tensor"))
    model = load(options.model).to(device)
    if options.tensor > 1:
        shard_heads(model, grid["tensor"])
    sharded = parallelize(model, bp.Mesh.from_device_mesh(grid, "sequence"), strategy=options.strategy)
    averaging = grid["data", "sequence"]._flatten("averaging")
    for part in [*model.base_model.layers, model]:
        fully_shard(part, mesh=averaging)
    # Some weights are sharded over two axes, others over one: operations on lists of both are not implemented.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 if options.model is None else 1e-5, foreach=False)
    tokens = read_tokens(options.model, text)
    batch = options.sequences * options.seq_len
    losses = []
    for step in range(options.steps):
        rows = tokens[step * batch : (step + 1) * batch].view(options.sequences, options.seq_len)
        mine = rows.chunk(options.data)[grid["data"].get_local_rank()].to(device)
        inputs = sharded.shard(mine)
        dist.all_reduce(inputs["num_items_in_batch"], group=grid["data"].get_group())  # labels of all data ranks
        loss = model(**inputs).loss  # this rank's part of the mean over all tokens
        (loss * averaging.size()).backward()  # FSDP averages over these ranks; parts of a mean are added
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=averaging.get_group())
        losses.append(total.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a checkpoint; default: a small Llama with random weights")
    parser.add_argument("--text", type=Path, help="text file; default: English that comes with Python")
    parser.add_argument("--data", type=int, default=1, help="ranks of the axis data: groups with different sequences")
    parser.add_argument("--tensor", type=int, default=1, help="ranks of the axis tensor: groups with different heads")
    parser.add_argument("--strategy", default="auto", help="strategy of attention over the axis sequence")
    parser.add_argument("--sequences", type=int, default=2, help="sequences per step; a multiple of --data")
    parser.add_argument("--seq-len", type=int, default=253, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.exit(2, f"{parser.prog}: start it with torchrun\n")
    if min(options.data, options.tensor) < 1 or int(os.environ["WORLD_SIZE"]) % (options.data * options.tensor):
        parser.exit(2, f"{parser.prog}: --data times --tensor must divide {os.environ['WORLD_SIZE']} ranks\n")
    text = options.text.read_text() if options.text else "\n".join(pydoc_data.topics.topics.values())
    dist.init_process_group()
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    losses = train(options, text)
    if dist.get_rank() == 0:
        print("losses:", *(f"{loss:.6f}" for loss in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
