"""The rates that `run` predicts with: before its ranks are there, on each of them, and in what it says at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from burst_portable.backends.registry import may_go_first, rates_of

if TYPE_CHECKING:
    from burst_portable.backends.base import Backend
    from burst_portable.rates import Rates


def rates_of_run(backend: Backend, ranks: int, file: str, dtype: str, head_dim: int) -> Rates:
    """Those of `registry.rates_of`, over the process groups that `worker.join` makes."""
    first = ranks > 1 and may_go_first(backend)
    return rates_of(backend, ranks, file=file, dtype=dtype, head_dim=head_dim, goes_first=first)
