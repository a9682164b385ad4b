"""List the groups of checks in their order: cheap ones, which explain failures of later ones, come first."""

from __future__ import annotations

from burst_portable.conformance.base import Check
from burst_portable.conformance.checks import attention, buffers, claims, kernel_contract, profiler, transport

CHECKS: dict[str, Check] = {
    check.name: check
    for check in (
        claims.CHECK,
        kernel_contract.CHECK,
        transport.TRANSPORT,
        attention.ATTENTION,
        attention.SIZES,
        attention.FULLY_MASKED,
        attention.EXTREMES,
        buffers.CHECK,
        attention.DETERMINISM,
        profiler.CHECK,
        transport.GROUP,
    )
}
