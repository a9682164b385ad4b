"""Define `AttentionCall`: an attention over ranks, as pure data.

A call holds everything that decides the numbers, the bytes and the FLOPs of an attention, and nothing of how it is
executed. Strategies plan it, kernels read it, and it holds no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from burst_portable.layout import Layout
from burst_portable.mask import Mask

LEAST_SCALE = 1e-30
"""Smallest scale that a kernel which needs a positive scale is given.

Some kernels multiply weights by the scale or divide by it, and would leave the range of float32 below this value. The
kernels `reference` and `triton` take any scale.
"""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One attention, with resolved settings.

    After a head-parallel exchange, `dataclasses.replace` makes the call of one rank: fewer heads, and a layout with one
    member per group of ranks.

    Attributes:
        mask: Visible pairs, in global positions.
        layout: Tokens of q that each rank holds.
        heads: Query heads.
        kv_heads: Heads of K and V; a divisor of `heads`.
        head_dim: Size of a head of Q and K.
        value_dim: Size of a head of V and of the output.
        batch: Sequences per call.
        itemsize: Bytes of an element of q, k and v.
        dtype: Name of the dtype of q, k and v, such as "bfloat16"; "" for a plan that was made from sizes alone.
        device: torch's device type, such as "cuda"; "" for a plan that was made from sizes alone.
        scale: Factor of the scores.
        softcap: Scores become ``softcap * tanh(scores / softcap)``; None for no cap.
        deterministic: Whether gradients must be bitwise equal in every run.
        sinks: Whether each query head has a sink logit.
        kv_layout: Tokens of k and v that each rank holds; None if it equals `layout`.
    """

    mask: Mask
    layout: Layout
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    batch: int = 1
    itemsize: int = 2
    dtype: str = ""
    device: str = ""
    scale: float = 1.0
    softcap: float | None = None
    deterministic: bool = True
    sinks: bool = False
    kv_layout: Layout | None = None

    def __post_init__(self) -> None:
        if self.kv_layout is not None and self.kv_layout == self.layout:
            object.__setattr__(self, "kv_layout", None)  # equal calls must be equal as keys

    @property
    def k_layout(self) -> Layout:
        """Return the layout of k and v."""
        return self.layout if self.kv_layout is None else self.kv_layout

    @property
    def ranks(self) -> int:
        """Return the number of ranks that share the sequence."""
        return self.layout.ranks

    @property
    def area(self) -> int:
        """Return the number of visible (query, key) pairs per head, over the whole sequence."""
        return self.mask.area(self.layout.length, self.k_layout.length)

    @property
    def positive_scale(self) -> bool:
        """Whether the scale is positive and at least `LEAST_SCALE`."""
        return self.scale >= LEAST_SCALE
