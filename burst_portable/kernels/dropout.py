"""Drop attention weights by global position. Every rank, pass and recomputation gets the same mask from one seed.

With dropout, a weight P[i, j] of the softmax is multiplied by 0 with probability p, else by 1 / (1 - p)::

    out = (P * factor) V        dV = (P * factor)^T dO        dP = factor * (dO V^T)

The softmax is that of all keys, so LSE does not depend on dropout. Partial results are merged as without it, and delta
= rowsum(dO * O) is still rowsum(P * dP).

A random number depends only on the seed and the place of its weight. The place is the position of the query (row) and
of the key (column) in the unsharded sequence, the query head of the model, and the index in the batch. So it is equal
for every layout, strategy and number of ranks. It is one word of Philox4x32-10 (Salmon et al., "Parallel Random
Numbers: As Easy as 1, 2, 3", 2011), the generator of torch and Triton::

    word[column % 4] of Philox(counter = (column // 4, row, head, batch), key = (low, high) halves of the seed)

A weight is kept if its word is at least p * 2**32. Four neighboring columns share a counter, so a kernel with
neighboring columns needs a quarter of the work. This module has plain torch operations; `kernels.triton.common` has
the same for Triton kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from burst_portable.planning.call import Dropout
from burst_portable.planning.tiles import Positions, Tiles

_WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def threshold(p: float) -> int:
    """Return the number below which a word of 32 bits drops its weight."""
    return min(round(p * 2**32), _WORD)


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return the four words of Philox4x32-10 as int64 tensors.

    Args:
        counter: Four words, as int64 tensors whose shapes broadcast.
        key: Two words.
    """
    a, b, c, d = counter
    low, high = key
    for _ in range(_ROUNDS):
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # 64 bits; the sign is that of the highest
        a, b = (second >> 32 & _WORD) ^ b ^ low, second & _WORD
        c, d = (first >> 32 & _WORD) ^ d ^ high, first & _WORD
        low, high = (low + _KEY_STEPS[0]) & _WORD, (high + _KEY_STEPS[1]) & _WORD
    return a, b, c, d


def weight_factors(dropout: Dropout, rows: Tensor, columns: Tensor, batch: int, heads: int) -> Tensor:
    """Return the factors of weights, 0 or 1 / (1 - p), as float64 of shape [batch, heads, rows, columns].

    Args:
        dropout: The settings of the launch.
        rows: Global positions of the queries.
        columns: Global positions of the keys.
        batch: Sequences.
        heads: Query heads.
    """
    device = rows.device
    index = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    head = torch.arange(dropout.first_head, dropout.first_head + heads, device=device).view(-1, 1, 1)
    rows, columns = rows.long().view(-1, 1), columns.long()
    key = dropout.seed & _WORD, dropout.seed >> 32
    first, *others = philox((columns // 4, rows, head, index), key)
    for number, word in enumerate(others, 1):
        first = torch.where(columns % 4 == number, word, first)
    return (first >= threshold(dropout.p)).double() / (1.0 - dropout.p)


def positions_of(tiles: Tiles, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the global positions of the rows and the columns of a launch, as int32 tensors."""
    assert tiles.positions is not None, "a plan with dropout has positions"
    rows, columns = tiles.positions
    # A mode such as FakeTensorMode makes tensors without data, which no other call may find in the cache.
    make = _tensor if torch._C._len_torch_dispatch_stack() else _cached_tensor
    return make(rows, device), make(columns, device)


@lru_cache(maxsize=512)
def _cached_tensor(positions: Positions, device: torch.device) -> Tensor:
    return _tensor(positions, device)


def _tensor(positions: Positions, device: torch.device) -> Tensor:
    ranges = [torch.arange(s.start, s.last + 1, s.step, dtype=torch.int32, device="cpu") for s in positions]
    return torch.cat(ranges).to(device)
