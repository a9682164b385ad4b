"""Run an attention block as Megatron-LM does: heads sharded over one axis, and the tokens around it sharded as well.

The tokens of a rank of the sequence axis are sharded again over the tensor axis, and gathered before the projections.
Afterwards, the partial sums of the output projection are reduced and scattered.
"""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import burst_portable as bp

TOKENS, WIDTH, HEADS, KV_HEADS, DIM = 32, 24, 8, 4, 6


def whole() -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the input, the gradient of the output, and the weights of the four projections, in float64."""
    generator = torch.Generator().manual_seed(3)
    sizes = [(WIDTH, HEADS * DIM), (WIDTH, KV_HEADS * DIM), (WIDTH, KV_HEADS * DIM), (HEADS * DIM, WIDTH)]
    x, dout = torch.randn(2, 1, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    return x, dout, [torch.randn(size, generator=generator, dtype=torch.float64) / 5 for size in sizes]


def on_one_device() -> list[Tensor]:
    """Return the output, the gradient of the input, and those of the weights, from torch's operators alone."""
    x, dout, weights = whole()
    leaves = [one.requires_grad_() for one in (x, *weights)]
    q, k, v = ((x @ w).view(1, TOKENS, -1, DIM).repeat_interleave(HEADS * DIM // w.shape[1], 2) for w in weights[:3])
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * DIM**-0.5
    out = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
    y = out.flatten(2) @ weights[3]
    return [y.detach(), *torch.autograd.grad(y, leaves, dout)]


def errors_of_block(sequence: int, tensor: int, strategy: str) -> dict[str, float]:
    """Return the largest difference from one device of each result of this rank, for axes of these sizes."""
    grid = init_device_mesh("cpu", (sequence, tensor), mesh_dim_names=("sequence", "tensor"))
    mesh, group, part = (
        bp.Mesh.from_device_mesh(grid, "sequence"),
        grid.get_group("tensor"),
        grid.get_local_rank("tensor"),
    )

    def mine(tokens: Tensor) -> Tensor:
        return bp.shard(tokens, mesh, layout="zigzag").chunk(tensor, 1)[part].contiguous()

    x, dout, weights = whole()
    shards = [w.chunk(tensor, 1)[part] for w in weights[:3]] + [weights[3].chunk(tensor, 0)[part]]
    leaves = [one.detach().clone().requires_grad_() for one in (mine(x), *shards)]
    gathered = collectives.all_gather_tensor_autograd(leaves[0], 1, group)
    q, k, v = ((gathered @ w).unflatten(2, (-1, DIM)) for w in leaves[1:4])
    out = bp.attention(q, k, v, mesh=mesh, layout="zigzag", seq_len=TOKENS, strategy=strategy)
    partial = out.flatten(2) @ leaves[4]
    y = collectives.reduce_scatter_tensor_autograd(partial, "sum", 1, group)
    dx, *dweights = torch.autograd.grad(y, leaves, mine(dout))
    dweights = [bp.all_reduce(one, mesh) for one in dweights]
    right_y, right_dx, *right = on_one_device()
    right = [w.chunk(tensor, 1)[part] for w in right[:3]] + [right[3].chunk(tensor, 0)[part]]
    found = {"y": (y, mine(right_y)), "dx": (dx, mine(right_dx))}
    found |= {f"dw{i}": pair for i, pair in enumerate(zip(dweights, right, strict=True))}
    return {name: float((one.detach() - other).abs().max()) for name, (one, other) in found.items()}
