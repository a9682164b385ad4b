"""The groups of checks, in the order in which they run: cheap ones that explain failures of later ones come first."""

from __future__ import annotations

from burst_portable.conformance.checks import (
    attention,
    blind,
    claims,
    extremes,
    group,
    profiler,
    sizes,
    steady,
    transport,
)
from burst_portable.conformance.checks import buffers as memory
from burst_portable.conformance.checks import kernel_contract as kernels
from burst_portable.conformance.trial import Check

CHECKS: dict[str, Check] = {
    module.NAME: module.CHECK
    for module in (claims, kernels, transport, attention, sizes, blind, extremes, memory, steady, profiler, group)
}
