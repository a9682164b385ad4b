"""Run the diffs of docs/migration, on ranks that start as by torchrun, and check what they compute.

Each function below makes the names that a diff uses, and returns them with a check of the names afterwards. Every new
half runs. The old halves of `OLD` run too; `test_migration.py` checks the names and calls of all.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

import burst_portable as bp
from burst_portable.integrations.transformers import parallelize
from tests.support.other_libraries import stand_ins, with_flash_attn

Names = dict[str, Any]
Example = tuple[Names, Callable[[Names], bool]]
TOKENS, ULYSSES = 64, 2


def halves(diff: str) -> tuple[str, str]:
    """Return the old and the new half of a diff."""
    lines = diff.splitlines()
    assert all(line[:1] in ("", " ", "+", "-") for line in lines), diff
    old, new = ([line[1:] for line in lines if line[:1] in ("", " ", sign)] for sign in "-+")
    return "\n".join(old), "\n".join(new)


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of shape [B, S, H, D]."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, TOKENS, heads, 16, generator=generator) for heads in (4, 2, 2))
    return q, k, v


def reference(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Return attention on one device."""
    x = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(*x, enable_gqa=True, **options).transpose(1, 2)


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, atol=1e-5)


def zigzag(x: Tensor) -> Tensor:
    """Return the tokens of this rank, as ring-flash-attention, Megatron and Transformer Engine select them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks = x.chunk(2 * ranks, dim=1)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]), dim=1)


def contiguous(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


def one_device_call() -> Example:
    q, k, v = tensors()
    distance = torch.arange(TOKENS).unsqueeze(1) - torch.arange(TOKENS)
    visible = (distance >= 0) & (distance <= 255)
    return {"q": q, "k": k, "v": v}, lambda names: close(
        names["out"], reference(q, k, v, attn_mask=visible, scale=0.125)
    )


def packed_call() -> Example:
    ends = [0, 20, 50, TOKENS]
    q, k, v = (x[0] for x in tensors())
    names: Names = {"q": q, "k": k, "v": v, "cu_seqlens": torch.tensor(ends), "total_tokens": TOKENS}
    parts = [reference(*(x[None, a:b] for x in (q, k, v)), is_causal=True) for a, b in pairwise(ends)]

    def check(names: Names) -> bool:
        out = bp.unshard(names["out"], names["mesh"], seq_len=TOKENS, **names["where"])
        return close(out, torch.cat(parts, dim=1))

    return names, check


def local_call(shard: Callable[[Tensor], Tensor]) -> Callable[[], Example]:
    def make() -> Example:
        q, k, v = tensors()
        local = dict(zip(("local_q", "local_k", "local_v"), map(shard, (q, k, v)), strict=True))
        out = shard(reference(q, k, v, is_causal=True))
        return {**local, "group": dist.group.WORLD}, lambda names: close(names["out"].reshape(out.shape), out)

    return make


def context_parallel_call() -> Example:
    q, k, v = tensors()
    names: Names = {name: x.transpose(1, 2).contiguous() for name, x in (("q", q), ("k", k), ("v", v))}
    names["cp_mesh"] = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    expected = reference(q, k, v, is_causal=True).transpose(1, 2)
    return names, lambda names: close(names["full_out"], expected)


def usp_call() -> Example:
    q, k, v = tensors()
    ranks = dist.get_world_size()
    names: Names = {"q": q, "k": k, "v": v, "rank": dist.get_rank(), "world_size": ranks}
    names |= {"ulysses": ULYSSES, "ring": ranks // ULYSSES}
    return names, lambda names: close(names["out"], zigzag(reference(q, k, v, is_causal=True)))


def megatron_batch() -> Example:
    tokens = torch.arange(TOKENS).unsqueeze(0)
    names: Names = {"tokens": tokens, "mesh": bp.Mesh.from_group()}
    return names, lambda names: torch.equal(names["local_tokens"], zigzag(tokens))


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=2, **sizes))


def hugging_face(batches: list[Any]) -> Callable[[], Example]:
    """Return an example that compares the weights after the loop with those of one device."""

    def make() -> Example:
        model, single = llama(), llama()
        names: Names = {"model": model, "batches": batches, "group": dist.group.WORLD}
        names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
        sharded, optimizer = parallelize(single, bp.Mesh.single()), torch.optim.SGD(single.parameters(), lr=0.1)
        for batch in batches:
            ids, ends = (batch["input_ids"], None) if isinstance(batch, dict) else batch
            single(**sharded.shard(ids, cu_seqlens=ends)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return names, lambda names: all(map(close, model.parameters(), single.parameters()))

    return make


class TinyModel(nn.Module):
    """A model that takes token ids and position ids, as that of the page."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.mesh = nn.Embedding(256, 16), nn.Linear(16, 256), mesh

    def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(ids).unsqueeze(2)
        x = bp.nn.apply_rotary_embedding(x, position_ids)
        return self.head(bp.attention(x, x, x, mesh=self.mesh).squeeze(2))


def context_parallel_step() -> Example:
    ids = torch.arange(TOKENS).unsqueeze(0)
    cp_mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model, single = TinyModel(cp_mesh), TinyModel(bp.Mesh.single())
    logits = single(ids, torch.arange(TOKENS))[:, :-1]
    cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names: Names = {"input_ids": ids, "model": model, "cp_mesh": cp_mesh, "optimizer": optimizer}
    names["cross_entropy"] = cross_entropy
    return names, lambda names: all(
        close(x.grad, y.grad) for x, y in zip(model.parameters(), single.parameters(), strict=True)
    )


IDS = torch.randint(0, 256, (2, 1, TOKENS), generator=torch.Generator().manual_seed(1))
EXAMPLES: dict[str, list[Callable[[], Example]]] = {
    "flash_attn": [one_device_call, packed_call],
    "ring_flash_attn": [local_call(zigzag), hugging_face([(ids, (0, 20, 50, TOKENS)) for ids in IDS])],
    "ulysses": [local_call(contiguous), hugging_face([{"input_ids": ids} for ids in IDS])],
    "context_parallel": [context_parallel_call, context_parallel_step],
    "yunchang": [usp_call],
    "transformer_engine": [local_call(zigzag), megatron_batch],
}
"""By page: one entry for each of its diffs."""


def packed_call_of_flash_attn() -> Example:
    names, _ = packed_call()
    q, k, v, ends = (names[name] for name in ("q", "k", "v", "cu_seqlens"))
    parts = [reference(*(x[None, a:b] for x in (q, k, v)), is_causal=True) for a, b in pairwise(ends.tolist())]
    return {**names, "max_seqlen": 30}, lambda names: close(names["out"], torch.cat(parts, dim=1)[0])


def context_parallel_call_of_torch() -> Example:
    """Return a call of which only the shape is checked: context_parallel has no operator for CPUs."""
    names, _ = context_parallel_call()
    return names, lambda names: names["full_out"].shape == names["q"].shape


def usp_call_of_yunchang() -> Example:
    """Return the call whose results are in the rows of the package's own layout."""
    names, _ = usp_call()
    expected = reference(names["q"], names["k"], names["v"], is_causal=True)
    place = {"world_size": names["world_size"], "rd": names["ring"], "ud": names["ulysses"]}
    return names, lambda names: close(names["out"], names["extract"](expected, names["rank"], **place))


OLD: dict[tuple[str, int], Callable[[], Example]] = {
    ("flash_attn", 0): one_device_call,
    ("flash_attn", 1): packed_call_of_flash_attn,
    ("ring_flash_attn", 0): local_call(zigzag),
    ("context_parallel", 0): context_parallel_call_of_torch,
    ("yunchang", 0): usp_call_of_yunchang,
}
"""By page and number: the names of the old halves that run."""


def run(code: str, what: str, names: Names) -> Names:
    exec(compile(code, what, "exec"), names)
    return names


def with_stand_ins(names: Names) -> Names:
    """Return the names, and an import that finds stand-ins for absent libraries. Other code imports as before."""
    modules = stand_ins()
    modules["ring_flash_attn"] = with_flash_attn("ring_flash_attn", "zigzag_ring_flash_attn")

    def find(name: str, *rest: Any) -> Any:
        return modules[name] if name in modules else builtins.__import__(name, *rest)

    return {**names, "__builtins__": {**vars(builtins), "__import__": find}}


def diffs(page: Path) -> Iterator[str]:
    parts = page.read_text(encoding="utf-8").split("\n```")
    return (part.removeprefix("diff\n") for part in parts if part.startswith("diff\n"))


def check_example(folder: Path, name: str, number: int) -> None:
    """Run the new half of a diff, and the old one if it is in `OLD`; check what each computes."""
    what = f"diff {number} of {name}.md"
    old, new = halves(list(diffs(folder / f"{name}.md"))[number])
    if (name, number) in OLD:
        names, check = OLD[name, number]()
        assert check(run(old, f"old half of {what}", with_stand_ins(names))), f"old half of {what}"
    names, check = EXAMPLES[name][number]()
    assert check(run(new, what, names)), what


def main() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, examples in EXAMPLES.items():
        for number, make in enumerate(examples):
            if make is not one_device_call:
                check_example(Path(sys.argv[1]), name, number)
    dist.destroy_process_group()
    return 0
