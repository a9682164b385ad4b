"""Call MagiAttention (SandAI-org/MagiAttention 1.1), which takes masks as slices of four types.

A slice is a box of queries and keys. CAUSAL aligns the diagonal to its bottom right corner, INVCAUSAL to its top left
corner, and BICAUSAL is both.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from burst_portable.errors import UnsupportedError
from burst_portable.mask import Mask, Region

CHUNK = 512
"""Tokens that MagiAttention moves together; its default."""


class Slice(NamedTuple):
    """Queries [q_start, q_stop), keys [k_start, k_stop), and the name of a mask type."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    kind: str


def mask_slices(mask: Mask, length: int) -> list[Slice]:
    """Return disjoint slices that cover the visible pairs of a mask."""
    return [part for region in mask.regions_of_rows(0, length) for part in _region_slices(region, length)]


def _region_slices(region: Region, length: int) -> Iterator[Slice]:
    """Yield slices of rows in which each bound of the band cuts all rows or none."""
    first, past = region.rows(length)
    k_start, k_stop = region.k_start, min(region.k_stop, length)
    cuts = {first, past, k_stop + region.lo, k_start + region.hi}
    ends = sorted(x for x in cuts if first <= x <= past)
    for a, b in pairwise(ends):
        left, right = max(k_start, a - region.hi), min(k_stop, b - region.lo)
        is_causal, is_inverse = right > a - region.lo + 1, left < b - 1 - region.hi
        yield Slice(a, b, left, right, ("FULL", "CAUSAL", "INVCAUSAL", "BICAUSAL")[is_causal + 2 * is_inverse])


class MagiCall:
    """One call of MagiAttention on this rank.

    Args:
        mask: Mask of the call.
        q: Unsharded queries, [S, Hq, D].
        k: Unsharded keys, [S, H, D].
        group: Process group of the ranks.

    Raises:
        ImportError: If the package cannot be imported.
        UnsupportedError: If it would pad the sequence.
    """

    def __init__(self, mask: Mask, q: Tensor, k: Tensor, group: Any) -> None:
        from magi_attention import api
        from magi_attention.common import AttnRanges
        from magi_attention.common.enum import AttnMaskType

        length, ranks = q.shape[0], dist.get_world_size(group)
        if length % (CHUNK * ranks):
            raise UnsupportedError(
                "it would pad the sequence", got=f"{length:,} tokens", allowed=f"a multiple of {CHUNK * ranks}"
            )
        slices = mask_slices(mask, length)
        self._api = api
        self._key = api.magi_attn_flex_key(
            q_ranges=AttnRanges.from_ranges([(one.q_start, one.q_stop) for one in slices]),
            k_ranges=AttnRanges.from_ranges([(one.k_start, one.k_stop) for one in slices]),
            attn_mask_type=[AttnMaskType[one.kind] for one in slices],
            total_seqlen_q=length,
            total_seqlen_k=length,
            num_heads_q=q.shape[1],
            num_heads_kv=k.shape[1],
            head_dim=q.shape[2],
            pad_size=0,
            chunk_size=CHUNK,
            cp_group_or_mesh=group,
        )

    def shard(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of an unsharded tensor [S, H, D]."""
        local: Tensor = self._api.dispatch(x, key=self._key)
        return local

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of this rank's tokens, [S, H, D]."""
        out: Tensor = self._api.calc_attn(q, k, v, key=self._key)[0]
        return out
