"""Test whole attentions with fully masked rows."""

from __future__ import annotations

from collections.abc import Iterator

from burst_portable.conformance.base import BackendUnderTest
from burst_portable.conformance.cases import (
    DTYPES,
    LENGTH,
    Case,
)
from burst_portable.conformance.checks.comparison import check_of_cases


def fully_masked_cases(target: BackendUnderTest) -> Iterator[Case]:
    """Yield masks with fully masked rows, for every strategy and dtype."""
    quick = target.coverage == "quick"
    for strategy in ("ring", "burst") if quick and not target.strategy else target.strategies:
        yield Case(mask="fully_masked_rows", strategy=strategy, ranks=2)
        yield Case(mask="custom", strategy=strategy, layout="striped", ranks=3, sinks=strategy == "burst")
    for dtype in () if quick or target.strategy else DTYPES.values():
        for ranks in (1, 2, 3, 8):
            yield Case(mask="fully_masked_rows", dtype=dtype, ranks=ranks, layout="contiguous", length=LENGTH)


CHECK = check_of_cases(
    "fully_masked", "fully masked rows: out 0, LSE -inf, gradients 0", fully_masked_cases, by_strategy=True
)
