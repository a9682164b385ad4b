"""Define `AttentionCall`, an attention over ranks as pure data, and `KernelTraits`, what a kernel declares.

A call holds everything that decides the numbers, the bytes and the FLOPs of an attention, and nothing of how it is
executed. Strategies plan it, kernels read it, and it holds no tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from burst_portable.layout import Layout, make_layout
from burst_portable.mask import Mask

LEAST_SCALE = 1e-30
"""Smallest scale that a kernel which needs a positive scale is given.

Some kernels multiply weights by the scale or divide by it, and would leave the range of float32 below this value. The
kernels `reference` and `triton` take any scale.
"""


@dataclass(frozen=True, slots=True)
class KernelTraits:
    """Properties that a kernel declares. A trait saves time or affects the predicted time; none changes a result.

    Attributes:
        splits_tiles: It calls an operator on parts of a tile and merges their results. `auto` estimates their
            cost, and the rows of several ranks are put in order first, so that there are few parts.
        single_pass_merge: Each of these merges is one pass over memory.
        writes_gradients: Its `backward_single_call` writes dK and dV of large calls in 16 bits. Other kernels add them
            up in float32 and round them.
        prefers_square: It is faster if a whole call is one box or one causal square. The rows of several ranks are then
            put in order first.
        supports_causal_window: Its operator computes a causal window over a whole square in one call.
        supports_documents: Its operator computes consecutive documents of a sequence in one call.
        writes_into: It has `attend_into`.
        compiles_ahead: It compiles its kernels for tensors of torch's device "meta" (`kernels.triton.compile_only`).
        target: The only target of its kernels, such as "sm_90"; "" for all that its compiler has.
        supports_dropout: It drops weights by global position: see `kernels.dropout`.
        rounding: Relative error to which it rounds factors that have a wider dtype: 2**-10 with TF32. The conformance
            suite allows for it.
    """

    splits_tiles: bool = False
    single_pass_merge: bool = False
    writes_gradients: bool = False
    prefers_square: bool = False
    supports_causal_window: bool = False
    supports_documents: bool = False
    writes_into: bool = False
    compiles_ahead: bool = False
    target: str = ""
    supports_dropout: bool = False
    rounding: float = 0.0


class Dropout(NamedTuple):
    """Dropout of attention weights: see `kernels.dropout`.

    Attributes:
        p: Probability with which a weight is dropped, above 0 and below 1.
        first_head: Index of the first query head of the call among all heads of the model.
        seed: Seed of the call, below 2**63. It is 0 in plans, which do not depend on it.
    """

    p: float
    first_head: int = 0
    seed: int = 0


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
        v_head_dim: Size of a head of V and of the output.
        batch: Sequences per call.
        itemsize: Bytes of an element of q, k and v.
        dtype: Name of the dtype of q, k and v, such as "bfloat16"; "" for a plan that was made from sizes alone.
        device: torch's device type, such as "cuda"; "" for a plan that was made from sizes alone.
        scale: Factor of the scores.
        softcap: Scores become ``softcap * tanh(scores / softcap)``; None for no cap.
        deterministic: Whether gradients must be bitwise equal in every run.
        sinks: Whether each query head has a sink logit.
        kv_layout: Tokens of k and v that each rank holds; None if it equals `layout`.
        dropout: Dropout of attention weights; None for none.
    """

    mask: Mask
    layout: Layout
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    batch: int = 1
    itemsize: int = 2
    dtype: str = ""
    device: str = ""
    scale: float = 1.0
    softcap: float | None = None
    deterministic: bool = True
    sinks: bool = False
    kv_layout: Layout | None = None
    dropout: Dropout | None = None

    def __post_init__(self) -> None:
        if self.kv_layout is not None and self.kv_layout == self.layout:
            object.__setattr__(self, "kv_layout", None)  # equal calls must be equal as keys

    @classmethod
    def of(
        cls,
        q: Any,
        k: Any,
        v: Any,
        *,
        mask: Mask | None = None,
        layout: Layout | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        deterministic: bool = True,
        sinks: bool = False,
        device: str | None = None,
        dropout: Dropout | None = None,
    ) -> AttentionCall:
        """Return the call for these tensors; only their shapes, dtype and device are read.

        Args:
            q: Queries of shape [B, S, Hq, D].
            k: Keys of shape [B, S', Hkv, D].
            v: Values of shape [B, S', Hkv, Dv].
            mask: Visible pairs. Default: all.
            layout: Tokens of q that each rank holds. Default: one rank holds all tokens of q, and all of k and v.
            scale: Factor of the scores. Default: 1/sqrt(D).
            softcap: Cap of the scores. Default: none.
            deterministic: Whether gradients must be bitwise equal in every run.
            sinks: Whether each query head has a sink logit.
            device: torch's device type. Default: that of q.
            dropout: Dropout of attention weights. Default: none.
        """
        kv_layout = None
        if layout is None:
            layout = make_layout("contiguous", q.shape[1], 1)
            kv_layout = make_layout("contiguous", k.shape[1], 1) if k.shape[1] != q.shape[1] else None
        return cls(
            mask=Mask.full() if mask is None else mask,
            layout=layout,
            heads=q.shape[2],
            kv_heads=k.shape[2],
            head_dim=q.shape[3],
            v_head_dim=v.shape[3],
            batch=q.shape[0],
            itemsize=q.dtype.itemsize,
            dtype=str(q.dtype).removeprefix("torch."),
            device=q.device.type if device is None else device,
            scale=1.0 / math.sqrt(q.shape[3]) if scale is None else scale,
            softcap=softcap,
            deterministic=deterministic,
            sinks=sinks,
            kv_layout=kv_layout,
            dropout=dropout,
        )

    def facts(self) -> dict[str, int | str]:
        """Return the sizes, the mask and the layout, under their keys in the JSON of plans, runs and profiles."""
        return {
            "seq_len": self.layout.length,
            "ranks": self.ranks,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "v_head_dim": self.v_head_dim,
            "batch": self.batch,
            "itemsize": self.itemsize,
            "mask": str(self.mask),
            "layout": self.layout.describe(),
        }

    @property
    def k_layout(self) -> Layout:
        """Return the layout of k and v."""
        return self.layout if self.kv_layout is None else self.kv_layout

    @property
    def ranks(self) -> int:
        """Return the number of ranks that share the sequence."""
        return self.layout.ranks

    @property
    def num_pairs(self) -> int:
        """Return the number of visible (query, key) pairs per head, over all tokens."""
        return self.mask.num_pairs(self.layout.length, self.k_layout.length)

    @property
    def positive_scale(self) -> bool:
        """Return whether the scale is at least `LEAST_SCALE`, which is positive."""
        return self.scale >= LEAST_SCALE
