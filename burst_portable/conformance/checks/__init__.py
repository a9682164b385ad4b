"""The groups of checks, in the order in which they run: cheap ones that explain failures of later ones come first."""

from __future__ import annotations

from burst_portable.conformance.checks import attention, buffers, claims, kernel_contract, profiler, transport
from burst_portable.conformance.trial import Check

CHECKS: dict[str, Check] = {
    check.name: check
    for check in (
        claims.CHECK,
        kernel_contract.CHECK,
        transport.TRANSPORT,
        attention.ATTENTION,
        attention.SIZES,
        attention.BLIND,
        attention.EXTREMES,
        buffers.CHECK,
        attention.STEADY,
        profiler.CHECK,
        transport.GROUP,
    )
}
