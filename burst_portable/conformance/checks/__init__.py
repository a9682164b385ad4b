"""List the groups of checks in their order: cheap ones, which explain failures of later ones, come first."""

from __future__ import annotations

from burst_portable.conformance.base import Check
from burst_portable.conformance.checks import (
    attention,
    buffers,
    claims,
    determinism,
    extremes,
    fully_masked,
    kernel_contract,
    profiler,
    sizes,
    transport,
)

CHECKS: dict[str, Check] = {
    check.name: check
    for check in (
        claims.CHECK,
        kernel_contract.CHECK,
        transport.TRANSPORT,
        attention.CHECK,
        sizes.CHECK,
        fully_masked.CHECK,
        extremes.CHECK,
        buffers.CHECK,
        determinism.CHECK,
        profiler.CHECK,
        transport.GROUP,
    )
}
