"""Continue the selective scans of Mamba 1 layers, which have no argument for a first state.

Each channel has N numbers as its state. A scan computes them and the output of each token t:

    h[t] = exp(A * dt[t]) * h[t - 1] + dt[t] * B[t] * x[t]
    y[t] = C[t] * h[t]

The layer's own scan begins with zeros. Gradients of its last state are lost in the kernel of `mamba_ssm`. So the same
function computes the scan again, with N tokens more at both ends:

- Token n before the sequence has the unit vector n as B, and sets number n of the state.
- Token n after the sequence has dt = 0 and the unit vector n as C, so its output is number n of the last state.

The result replaces the input of the layer's last projection. The layer's own result is not used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, silu, softplus
from transformers.activations import ACT2FN

from burst_portable.errors import UnsupportedError
from burst_portable.utils.torch_modes import disable_autocast

_OPTIONS = ("use_mambapy", "use_associative_scan")
"""Attributes of layers that select an implementation of the scan."""
_SETTING = 2.0**-20
"""dt of the tokens that set the first state. Small, so that it hardly decays until the first token."""


class Scan(NamedTuple):
    """Inputs of the scans of H heads with D channels each, and the gate of their outputs.

    Attributes:
        x: ``[H, B, D, S]``.
        dt: ``[H, B, D, S]``.
        a: ``[H, D, N]``.
        b: ``[H, B, N, S]``.
        c: ``[H, B, N, S]``.
        d: ``[H, D]``.
        gate: ``[H, B, D, S]``.
    """

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor
    gate: Tensor


def _jamba(layer: Any, x: Tensor, projected: Tensor) -> Scan:
    """Return the scan of a layer from the output of its convolution ``[B, D, S]`` and of `in_proj`."""
    sizes = [layer.time_step_rank, layer.ssm_state_size, layer.ssm_state_size]
    step, b, c = layer.x_proj(x.transpose(1, 2)).split(sizes, dim=-1)
    b, c = layer.b_layernorm(b).transpose(1, 2), layer.c_layernorm(c).transpose(1, 2)
    dt = layer.dt_proj.weight @ layer.dt_layernorm(step).transpose(1, 2)
    gate = projected.transpose(1, 2).chunk(2, dim=1)[1]
    x, dt, a, b, c, d, bias, gate = (
        part.unsqueeze(0) for part in (x, dt, layer.A_log, b, c, layer.D, layer.dt_proj.bias, gate)
    )
    return Scan(x, _positive(dt, bias), -torch.exp(a.float()), b, c, d, gate)


def _zamba(layer: Any, x: Tensor, projected: Tensor) -> Scan:
    """Return the scans of a layer, whose heads have their own projections."""
    heads = (layer.n_mamba_heads, layer.mamba_head_dim)
    x = x.unflatten(1, heads).transpose(0, 1)
    sizes = [layer.time_step_rank, layer.ssm_state_size, layer.ssm_state_size]
    step, b, c = (layer.x_proj_weight[:, None] @ x).split(sizes, dim=-2)
    dt = _positive(layer.dt_proj_weight[:, None] @ step, layer.dt_proj_bias)
    gate = projected.unflatten(-1, (*heads, 2))[..., 1].permute(2, 0, 3, 1)
    return Scan(x, dt, -torch.exp(layer.A_log.float()), b, c, layer.D, gate)


_SCANS: dict[str, Callable[[Any, Tensor, Tensor], Scan]] = {"JambaMambaMixer": _jamba, "ZambaMambaMixer": _zamba}
"""Inputs of the scans of each supported layer, by the name of its class."""


def _positive(dt: Tensor, bias: Tensor) -> Tensor:
    """Return the time steps, of which ``[H, B, D, S]`` are given before their bias ``[H, D]``."""
    return softplus(dt.to(_dtype(dt)) + bias[:, None, :, None].float())


def _dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of states."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def selective_scan_of(layer: nn.Module) -> SelectiveScan | None:
    """Return what continues the scan of a Mamba 1 layer, or None for another layer."""
    return SelectiveScan(layer) if type(layer).__name__ in _SCANS else None


class SelectiveScan:
    """The scan of one layer: it takes the gate from the first projection, and gives the last one its input."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._inputs = _SCANS[type(layer).__name__]
        module: Any = inspect.getmodule(type(layer))
        options = {name: getattr(layer, name) for name in _OPTIONS if hasattr(layer, name)}
        self._function = partial(module.mamba_selective_scan, **options)
        self._first, self._last = layer.in_proj, layer.out_proj
        self._projected: Tensor | None = None
        self._output: Tensor | None = None

    def hooks(self) -> Iterator[Any]:
        """Install hooks on the projections of the layer, and yield their handles."""
        yield self._first.register_forward_hook(self._keep)
        yield self._last.register_forward_pre_hook(self._replace)

    def check_projections(self) -> None:
        """Raise `UnsupportedError` if the layer's projections are others than those with the hooks."""
        layer = self._layer
        if (layer.in_proj, layer.out_proj) != (self._first, self._last):
            what = f"projections of {type(layer).__name__} were replaced after parallelize"
            got = ", ".join(type(part).__name__ for part in (layer.in_proj, layer.out_proj))
            raise UnsupportedError(
                what, got=got, next_step="call undo() of the sharded model, and parallelize it again"
            )

    def _keep(self, _: nn.Module, args: Any, projected: Tensor) -> None:
        """Keep the gate, and forget the output of an earlier call (hook of the first projection)."""
        self._projected, self._output = projected, None

    def _replace(self, _: nn.Module, args: tuple[Tensor]) -> tuple[Tensor] | None:
        """Replace the output of the layer's own scan (pre-hook of the last projection)."""
        output, self._output, self._projected = self._output, None, None
        return None if output is None else (output.to(args[0].dtype),)

    def resume(self, first: Tensor | None, conv_inputs: Tensor) -> Tensor:
        """Compute the scan from its first state. Return the last state ``[B, H, D, N]``.

        Args:
            first: The first state ``[B, H, D, N]``. None: zeros.
            conv_inputs: Inputs of the convolution with those before the first token, ``[B, C, K - 1 + S]``.
        """
        layer = self._layer
        conv = layer.conv1d
        x = conv1d(conv_inputs.to(conv.weight.dtype), conv.weight, conv.bias, groups=conv.groups)
        x = ACT2FN[layer.activation](x).to(conv_inputs.dtype)
        assert self._projected is not None
        scan = self._inputs(layer, x, self._projected)
        y, last = zip(*(_scan_head(self._function, head, scan, first) for head in range(len(scan.x))), strict=True)
        gate = scan.gate.transpose(0, 1).flatten(1, 2)
        self._output = (torch.cat(y, dim=1) * silu(gate.to(y[0].dtype))).transpose(1, 2)
        return torch.stack(last, dim=1)


def _scan_head(function: Callable[..., Tensor], head: int, scan: Scan, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the outputs of one head before the gate ``[B, D, S]``, and its last state ``[B, D, N]``.

    Args:
        function: The selective scan of the layer's module.
        head: Number of the head.
        scan: Inputs of all heads.
        first: First states of all heads ``[B, H, D, N]``, or None.
    """
    x, dt, b, c = (part[head] for part in (scan.x, scan.dt, scan.b, scan.c))
    dtype, a = _dtype(x), scan.a[head]
    (batch, count, length), channels = b.shape, len(a)
    nothing = x.new_zeros(batch, channels, count, dtype=dtype)
    no_vector = x.new_zeros(batch, count, count, dtype=dtype)
    unit_vectors = no_vector + torch.eye(count, dtype=dtype, device=x.device)
    setting = nothing
    if first is not None:  # token n decays in the count - 1 - n tokens that follow before the sequence
        later = torch.arange(count - 1, -1, -1, device=x.device)
        setting = first[:, head].to(dtype) * torch.exp(-a.to(dtype) * _SETTING * later) / _SETTING
    with disable_autocast(x.device):
        y = function(
            torch.cat([setting, x.to(dtype), nothing], dim=-1),
            torch.cat([nothing + _SETTING, dt.to(dtype), nothing], dim=-1),
            a,
            torch.cat([unit_vectors, b.to(dtype), no_vector], dim=-1),
            torch.cat([no_vector, c.to(dtype), unit_vectors], dim=-1),
            D=scan.d[head].float(),
        )
    _, y, last = y.split([count, length, count], dim=-1)
    return y, last
