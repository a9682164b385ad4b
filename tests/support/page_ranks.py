"""Run the `py` blocks of docs/ on ranks that start as by torchrun, and check what they compute.

Each function below makes the names that a block uses, and returns them with a check of the names afterwards. A block
that needs a device, a package or a program of the reader has a `Named` instead: `test_docs.py` checks its imports, its
names and its calls.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import burst_portable as bp
from burst_portable.integrations.transformers import parallelize
from tests.support import megatron_block
from tests.support.code_names import Named
from tests.support.migration_ranks import Example, Names, close, llama, reference, run, tensors, zigzag

DOCS = Path(__file__).resolve().parents[2] / "docs"
IDS = torch.randint(0, 256, (3, 1, 50), generator=torch.Generator().manual_seed(1))


def fences(page: str, language: str) -> Iterator[str]:
    """Yield the blocks of a page in a language."""
    parts = (DOCS / page).read_text(encoding="utf-8").split("\n```")
    return (part.removeprefix(f"{language}\n") for part in parts if part.startswith(f"{language}\n"))


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def reference_model(batches: Tensor, *, step: bool) -> LlamaForCausalLM:
    """Return a model on one device with the gradients of the mean loss over batches, or after a step of SGD."""
    model = llama()
    for ids in batches:
        (model(input_ids=ids, labels=ids).loss / len(batches)).backward()
    if step:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model


def equal_gradients(model: Any) -> bool:
    expected = reference_model(IDS[:1], step=False).parameters()
    return all(close(full(x.grad), y.grad) for x, y in zip(model.parameters(), expected, strict=True))


def equal_weights(model: Any) -> bool:
    expected = reference_model(IDS, step=True).parameters()
    return all(close(full(x.detach()), y.detach()) for x, y in zip(model.parameters(), expected, strict=True))


def training(*, shard: bool) -> Names:
    """Return the names of a training program: a model over all ranks, sharded by FSDP2 if `shard` is set."""
    mesh, model = bp.Mesh.from_group(), llama()
    names: Names = {"bp": bp, "dist": dist, "torch": torch, "mesh": mesh, "model": model, "input_ids": IDS[0]}
    names |= {"sharded": parallelize(model, mesh), "fully_shard": fully_shard, "batches_of_one_step": list(IDS)}
    if shard:
        fully_shard(model)
    return {**names, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def plain_call(_: Path) -> Example:
    """Select this rank's tokens without a process group, because the block makes it."""
    q, k, v = tensors()
    layout = bp.make_layout("zigzag", q.shape[1], int(os.environ["WORLD_SIZE"]))
    local = [x[:, layout.positions(int(os.environ["RANK"]))] for x in (q, k, v)]
    names: Names = {"dist": dist, "bp": bp, "N": q.shape[1], **dict(zip("qkv", local, strict=True))}
    return names, lambda names: close(names["out"], zigzag(reference(q, k, v, is_causal=True)))


def loss_in_chunks(_: Path) -> Example:
    names = training(shard=False) | {"policy": MixedPrecisionPolicy()}
    (block,) = [block for block in fences("hugging_face.md", "python") if "class LossInChunks" in block]
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    definitions = [node for node in ast.parse(block).body if isinstance(node, kinds)]
    names |= {"rows": 7} | run(ast.unparse(ast.Module(definitions, [])), "LossInChunks", {"torch": torch})
    return names, lambda names: equal_gradients(names["model"])


def penalty_under_ddp(_: Path) -> Example:
    names = training(shard=False)
    model = names["ddp"] = DistributedDataParallel(names["model"])
    part = model(**names["sharded"].shard(IDS[0])).loss
    names |= {"part": part, "penalty": names["model"].lm_head.weight.pow(2).sum()}

    def check(names: Names) -> bool:
        expected = reference_model(IDS[:1], step=False)
        expected.lm_head.weight.pow(2).sum().backward()
        pairs = zip(names["model"].parameters(), expected.parameters(), strict=True)
        return all(close(x.grad, y.grad) for x, y in pairs)

    return names, check


def accumulated_step(_: Path) -> Example:
    return training(shard=False), lambda names: equal_weights(names["model"])


def accumulated_step_with_fsdp(_: Path) -> Example:
    names = training(shard=True)
    names["step"] = [names["sharded"].shard(ids) for ids in IDS]
    names["labels"] = sum(inputs["num_items_in_batch"] for inputs in names["step"])
    return names, lambda names: equal_weights(names["model"])


def data_parallel_step(_: Path) -> Example:
    names = training(shard=False)
    names["sharded"].undo()
    names |= {"device": "cpu", "data": 1, "sequence": dist.get_world_size(), "labels": IDS[0]}
    names |= {"init_device_mesh": init_device_mesh, "parallelize": parallelize}
    return names, lambda names: equal_gradients(names["model"])


def full_weights(folder: Path) -> Example:
    names = training(shard=True) | {"folder": folder / "full"}

    def check(names: Names) -> bool:
        dist.barrier()
        read = LlamaForCausalLM.from_pretrained(folder / "full").state_dict()
        return all(torch.equal(x, read[name]) for name, x in llama().state_dict().items())

    return names, check


def resumed_states(folder: Path) -> Example:
    names = training(shard=True) | {"folder": folder / "states"}
    names["model"](**names["sharded"].shard(IDS[0])).loss.backward()
    names["optimizer"].step()
    before = [x.detach().clone() for x in names["model"].parameters()]
    return names, lambda names: all(map(torch.equal, before, names["model"].parameters()))


def longer_context(folder: Path) -> Example:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(**llama().config.to_dict() | {"rope_parameters": rope, "max_position_embeddings": 131072})
    LlamaForCausalLM(config).save_pretrained(folder / "llama")  # transformers writes on rank 0 only
    dist.barrier()
    names: Names = {"path": folder / "llama", "AutoConfig": AutoConfig, "AutoModelForCausalLM": AutoModelForCausalLM}

    def check(names: Names) -> bool:
        made = names["model"].config
        return (made.max_position_embeddings, made.rope_parameters["factor"]) == (524288, 32.0)

    return names | {"torch": torch}, check


def ablated_step(_: Path) -> Example:
    names = training(shard=False)
    model, inputs = names["model"], names["sharded"].shard(IDS[0])
    with bp.profile(mesh=names["mesh"]) as session:
        model(**inputs).loss.backward()
    names |= {"session": session, "step": lambda: model(**inputs).loss.backward()}

    def check(names: Names) -> bool:
        report = names["session"].report()
        return (report is None) == (dist.get_rank() != 0)

    return names, check


def tensor_parallel_block(_: Path) -> Example:
    x, _dout, (*weights, wo) = megatron_block.whole()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    names: Names = {"bp": bp, "init_device_mesh": init_device_mesh, "device": "cpu", "sequence": 1, "tensor": ranks}
    for name in ("all_gather_tensor_autograd", "reduce_scatter_tensor_autograd"):
        names[name] = getattr(collectives, name)
    names |= {name: w.chunk(ranks, 1)[rank] for name, w in zip(("wq", "wk", "wv"), weights, strict=True)}
    names |= {"wo": wo.chunk(ranks, 0)[rank], "head_dim": megatron_block.DIM, "x": x.chunk(ranks, 1)[rank].contiguous()}
    y = megatron_block.on_one_device()[0].chunk(ranks, 1)[rank]
    return names, lambda names: close(names["x"], y)


def check_programs() -> None:
    """Run programs of docs/hugging_face.md on ranks with different seeds, as those of torchrun.

    A program that draws other rows or weights on each rank raises `MismatchError`.
    """
    step, trainer, accelerate = (
        next(block for block in fences("hugging_face.md", "python") if word in block)
        for word in ("def train_step", "SequenceTrainer(", "Accelerator(")
    )
    torch.manual_seed(dist.get_rank())
    names = run(step, "training step", {})
    loss, gradient = names["train_step"](bp.Mesh.from_group())
    assert close(loss, names["loss_1"])
    assert close(gradient, names["grad_1"])
    for name, code in (("Trainer", trainer), ("accelerate", accelerate)):
        torch.manual_seed(dist.get_rank())
        AcceleratorState._reset_state(reset_partial_state=True)  # accelerate keeps the first configuration of a process
        names = run(code, name, {})
        model = names["trainer"].model if name == "Trainer" else names["model"]
        weights = torch.cat([x.detach().flatten() for x in model.parameters()])
        every = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
        dist.all_gather(every, weights)
        assert all(torch.equal(x, weights) for x in every), name


HIGH_PRIORITY = Named("import torch.distributed as dist")
TENSOR_PARALLEL = Named(
    "import burst_portable as bp\n"
    "from burst_portable.integrations.transformers import parallelize\n"
    "from torch.distributed.device_mesh import init_device_mesh\n"
    "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module",
    "device data sequence tensor model",
)
EXAMPLES: dict[str, list[Callable[[Path], Example] | Named]] = {
    "backends.md": [HIGH_PRIORITY],
    "conformance.md": [Named()],
    "frameworks.md": [
        Named(names="model loader"),
        Named(
            "import lightning.pytorch as pl\n"
            "from burst_portable.integrations.lightning import SequenceFSDPStrategy\n"
            "from torch.distributed.fsdp import FSDPModule, fully_shard"
        ),
        Named(names="model dataset config"),
        Named(names="GPTModel config"),
    ],
    "several_nodes.md": [Named("import burst_portable as bp\nimport torch.distributed as dist"), HIGH_PRIORITY],
    "troubleshooting.md": [Named("import os\nimport torch.distributed as dist", "number")],
    "writing_a_backend.md": [
        Named("import torch", "acme_module make_process_group"),
        Named(),
        Named("import burst_portable as bp"),
    ],
    "quickstart.md": [plain_call],
    "hugging_face.md": [
        loss_in_chunks,
        Named("from burst_portable.integrations.transformers import parallelize", "model mesh input_ids"),
        accumulated_step,
        accumulated_step_with_fsdp,
        data_parallel_step,
        TENSOR_PARALLEL,
        full_weights,
        resumed_states,
        Named("from burst_portable.integrations.transformers import parallelize", "model mesh input_ids labels"),
        Named(names="model dataset tokenizer"),
        longer_context,
    ],
    "own_model.md": [penalty_under_ddp],
    "profiling.md": [ablated_step],
    "strategies.md": [tensor_parallel_block],
}
"""By page: one entry for each of its `py` blocks, which runs if the entry is a function."""


def main() -> int:
    torch.set_num_threads(1)
    for page, examples in EXAMPLES.items():
        for number, (make, code) in enumerate(zip(examples, fences(page, "py"), strict=True)):
            if isinstance(make, Named):
                continue
            names, check = make(Path(sys.argv[1]))
            assert check(run(code, f"py block {number} of {page}", names)), (page, number)
    check_programs()
    dist.destroy_process_group()
    return 0
