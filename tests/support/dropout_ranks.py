"""Run attention and train a model with dropout on ranks as processes, each with torch's own generator.

python -m tests.support.dropout_ranks FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

import burst_portable as bp
from burst_portable.config import Config
from burst_portable.errors import MismatchError
from burst_portable.integrations.transformers import parallelize
from tests.support.forked import run_forked
from tests.support.models import checkpoint_activations, make, tokens

RANKS = 3
SIZES = (2, 24, 4, 8)
"""Batch, tokens, heads and head size."""
STRATEGIES = ("ring", "ulysses")
RECOMPUTED = (None, False, True)
"""No checkpoints, and both kinds: whether they are reentrant."""


def results(mesh: bp.Mesh, strategy: str, recompute: bool | None, seed: int | None = None) -> list[Tensor]:
    """Return the unsharded output and gradients of two calls, whose seeds torch draws by default."""
    generator = torch.Generator().manual_seed(3)
    whole = [torch.randn(SIZES, generator=generator, dtype=torch.float64) for _ in range(3)]
    q, k, v = (bp.shard(x, mesh).requires_grad_() for x in whole)

    def region(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for _ in range(2):
            q = bp.attention(q, k, v, mesh=mesh, strategy=strategy, dropout_p=0.3, dropout_seed=seed).sin()
        return q

    out = region(q, k, v) if recompute is None else checkpoint(region, q, k, v, use_reentrant=recompute)
    out.square().sum().backward()
    return [bp.unshard(x.detach(), mesh, seq_len=SIZES[1]) for x in (out, q.grad, k.grad, v.grad)]


def drawn(mesh: bp.Mesh) -> dict[tuple[str, bool | None], list[Tensor]]:
    """Return the results of all ways, each from the same state of torch's generator."""
    found = {}
    for strategy in STRATEGIES:
        for recompute in RECOMPUTED:
            torch.manual_seed(5)
            found[strategy, recompute] = results(mesh, strategy, recompute)
    return found


def trained(mesh: bp.Mesh) -> dict[bool | None, list[float]]:
    """Return the losses of three steps of a Transformers model with attention dropout, without and with checkpoints."""
    found = {}
    for recompute in RECOMPUTED:
        model = make("llama", attention_dropout=0.4)
        if recompute is not None:
            checkpoint_activations(model, use_reentrant=recompute)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        torch.manual_seed(5)
        losses = []
        with parallelize(model, mesh) as sharded:
            for _ in range(3):
                loss = model(**sharded.shard(tokens())).loss
                loss.backward()
                bp.all_reduce_gradients(model.parameters(), mesh)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(bp.all_reduce(loss.detach(), mesh)))
        found[recompute] = losses
    return found


def trained_with_hidden_dropout(mesh: bp.Mesh) -> dict[str, list[float]]:
    """Return the losses of three steps with dropout of hidden states and attention, and what torch draws afterwards.

    47 tokens give ranks 16, 16 and 15 of them.
    """
    found = {}
    for recompute in RECOMPUTED:
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.3)
        model = GPT2LMHeadModel(config).double().train()
        if recompute is not None:
            checkpoint_activations(model, use_reentrant=recompute)
        torch.manual_seed(5)
        losses = []
        with parallelize(model, mesh) as sharded:
            for _ in range(3):
                model.zero_grad()
                loss = model(**sharded.shard(tokens())).loss
                loss.backward()
                bp.all_reduce_gradients(model.parameters(), mesh)
                losses.append(float(bp.all_reduce(loss.detach(), mesh)))
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        found[f"recompute={recompute}"] = [*losses, float(norm), float(torch.rand(()))]
    return found


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), RANKS), rank=rank, world_size=RANKS)
    every, first_two = bp.Mesh.from_group(config=Config(timeout=20)), dist.new_group([0, 1])
    found = {"losses of 3": trained(every), "hidden": trained_with_hidden_dropout(every)}
    if rank < 2:
        pair = bp.Mesh.from_group(first_two, config=Config(timeout=20))
        found |= {"losses of 2": trained(pair), "attention": drawn(pair)}
    torch.manual_seed(rank)
    try:
        results(every, "ring", None)
    except MismatchError as error:
        found["error"] = str(error)
    torch.save(found, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    run_forked(RANKS, main, Path(sys.argv[1]))
