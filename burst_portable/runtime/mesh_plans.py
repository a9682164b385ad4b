"""Plan for a mesh before there are tensors: `plan_for_mesh`, and the strategy with the hardware of a mesh."""

from __future__ import annotations

from dataclasses import replace

import torch

from burst_portable.backends.selection import choose_kernel
from burst_portable.errors import InputError, shown
from burst_portable.layout import Layout, contiguous
from burst_portable.mask import Mask
from burst_portable.mesh import Mesh, MeshLike, as_mesh
from burst_portable.planning.call import AttentionCall, Dropout
from burst_portable.planning.plans import Plan
from burst_portable.runtime.prepare import strategy_for_mesh
from burst_portable.runtime.validation import checked_deterministic, checked_device, checked_dropout
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.planner import call_of_sizes, plan_call
from burst_portable.utils.values import size


def plan_for_mesh(
    mesh: MeshLike = None,
    *,
    seq_len: int,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int = 128,
    v_head_dim: int | None = None,
    mask: Mask | str = "causal",
    strategy: Strategy | str = "auto",
    layout: Layout | str = "auto",
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | int | None = None,
    kernel: str = "auto",
    deterministic: bool | None = None,
    dropout_p: float = 0.0,
) -> Plan:
    """Return the plan that `attention` would run on this mesh, before there are tensors, with the fastest layout.

    Like `plan`, but with the speeds of this machine, its links and the kernel that will compute. Pass its `.layout` to
    `shard` and `attention`; `.reason` explains the choice. Equal arguments give equal plans on every rank.

    Args:
        mesh: As for `attention`.
        seq_len: As for `plan`.
        heads: As for `plan`.
        kv_heads: As for `plan`.
        head_dim: As for `plan`.
        v_head_dim: As for `plan`.
        mask: As for `attention`.
        strategy: As for `attention`.
        layout: As for `plan`. Default: "auto", the layout whose plan has the least predicted time.
        batch: As for `plan`.
        dtype: Dtype of q, k and v.
        device: Device of q, k and v. Default: torch's default device.
        kernel: As for `attention`.
        deterministic: As for `attention`.
        dropout_p: As for `attention`. It decides which kernels serve the call, and so the speeds.

    Raises:
        InputError: As for `plan`, the dtype or device is not one of torch's, or `dropout_p` is no probability.
        UnsupportedError: As for `plan`, or no kernel, or not the named one, serves such a call.
    """
    mesh = as_mesh(mesh)
    planner, call = strategy_and_call(
        mesh, strategy, device, heads=heads, kv_heads=heads if kv_heads is None else kv_heads, head_dim=head_dim,
        v_head_dim=v_head_dim, dtype=dtype, kernel=kernel, deterministic=deterministic, dropout_p=dropout_p,
    )  # fmt: skip
    sizes = call_of_sizes(
        seq_len=seq_len, ranks=mesh.size, heads=heads, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=v_head_dim,
        mask=mask, layout=layout, batch=batch, itemsize=dtype.itemsize,
    )  # fmt: skip
    described = replace(
        sizes, dtype=call.dtype, device=call.device, deterministic=call.deterministic, dropout=call.dropout
    )
    return plan_call(planner, described, layout)


def strategy_and_call(
    mesh: Mesh,
    strategy: Strategy | str,
    device: torch.device | str | int | None,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    dtype: torch.dtype,
    kernel: str = "auto",
    deterministic: bool | None = None,
    dropout_p: float = 0.0,
) -> tuple[Strategy, AttentionCall]:
    """Return the strategy for calls of these sizes on this machine, and such a call. See `plan_for_mesh`."""
    if not isinstance(dtype, torch.dtype):
        raise InputError(
            "dtype is not one of torch's", got=shown(dtype), allowed="a torch.dtype, for example torch.bfloat16"
        )
    heads, kv_heads, head_dim = size("heads", heads), size("kv_heads", kv_heads), size("head_dim", head_dim)
    v_head_dim = head_dim if v_head_dim is None else size("v_head_dim", v_head_dim)
    probability, _ = checked_dropout(dropout_p, 0)
    call = AttentionCall(
        Mask.full(), contiguous(mesh.size, mesh.size), heads, kv_heads, head_dim, v_head_dim,
        itemsize=dtype.itemsize, dtype=str(dtype).removeprefix("torch."),
        device=(checked_device(device) or torch.get_default_device()).type,
        deterministic=checked_deterministic(deterministic), dropout=Dropout(probability) if probability else None,
    )  # fmt: skip
    backend = mesh.backend_for(call.device)
    name = mesh.config.kernel if kernel == "auto" else kernel
    chosen, _ = choose_kernel(backend, call, name)  # raises now, even if the strategy does not need the kernel
    return strategy_for_mesh(strategy, mesh, call, backend, lambda: chosen), call
