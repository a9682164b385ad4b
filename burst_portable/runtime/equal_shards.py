"""Find calls in which every rank passes the full tensors in place of its shard.

The length of the sequence would be the tokens of a rank times the ranks, and the result that of a sequence which
repeats itself. So ranks compare a checksum of V, in an exchange that they make anyway. Once V of a shape has differed,
they do not compare V of this shape again. K is not compared: rotary positions, which modules take from the layout, make
it differ between ranks even if their tokens are equal.

Calls with `seq_len` or a `Layout` are not compared. They define the number of tokens of each rank, so full tensors of
that length raise `LayoutError`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burst_portable.comm.agreement import ComparedValues, call_signature
from burst_portable.errors import InputError
from burst_portable.layout import OF_MASKS
from burst_portable.planning.call import AttentionCall
from burst_portable.runtime.prepared_call import PreparedCall
from burst_portable.utils.checksum import position_weights, token_sums
from burst_portable.utils.torch_modes import disable_modes, is_capturing

UNKNOWN = 0
"""Checksum of V for which equal ranks prove nothing."""


def key_of_values(call: AttentionCall, rows: int) -> bytes:
    """Return the digest by which a transport remembers that its ranks had different V of the shape of a call.

    `rows`: Tokens of this rank, as many as those of every other rank.
    """
    shape = (call.batch, rows, call.kv_heads, call.v_head_dim)
    return call_signature({"compared": "V", "shape": str(shape), "dtype": call.dtype}).digest


def values_to_compare(prepared: PreparedCall, v: Tensor) -> ComparedValues | None:
    """Return this rank's V for the next comparison of the ranks. None: V of this shape need not be compared."""
    key = prepared.values_key
    if not key or key in prepared.transport.agreed:
        return None
    return ComparedValues(key, lambda: values_checksum(v), lambda: _equal_values(prepared, v))


def values_checksum(v: Tensor) -> int:
    """Return a checksum of V ``[B, S, H, Dv]`` by its bits and the order of its tokens, below 2**64.

    It is `UNKNOWN` if all tokens of each row are equal, as in a tensor of zeros or ones. All parts of such a sequence
    are equal, and every token gets the same output. It is also unknown while a graph of device work is captured,
    because reading it would end the capture. Otherwise the host waits for the device.
    """
    if v.shape[1] == 1 or is_capturing(v.device):
        return UNKNOWN
    with torch.no_grad(), disable_modes():
        sums = token_sums(v)
        checksum = (sums.view(-1) * position_weights(sums.numel(), v.device)).sum()
        return int(torch.where((sums == sums[:, :1]).all(), UNKNOWN, checksum)) % 2**64


def _equal_values(prepared: PreparedCall, v: Tensor) -> InputError:
    """Return the error of a call for which all ranks have the same V."""
    layout = prepared.plan.call.layout
    options = "" if layout.name == "zigzag" else f", layout={layout.name!r}" + ", mask=mask" * (layout.name in OF_MASKS)
    return InputError(
        "all ranks hold the same V, as if each had the full tensors",
        got=f"V of shape {tuple(v.shape)} on each of {layout.ranks} ranks, for a sequence of {layout.length} tokens",
        allowed="the tokens of this rank's shard",
        next_step=f"pass shard(x, mesh{options}) of each tensor; if ranks hold equal tokens on purpose, as in a "
        f"benchmark, pass seq_len={layout.length}, or draw other numbers on each rank",
    )
