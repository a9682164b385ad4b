"""Test the comparison of deterministic gradients, with the reference kernel and a kernel that varies."""

from __future__ import annotations

from benchmarks import deterministic
from burst_portable.kernels.reference import ReferenceKernel


class VaryingKernel(ReferenceKernel):
    """Kernel whose gradients differ from call to call."""

    calls = 0

    def backward_single_call(self, *args, **options):
        self.calls += 1
        return tuple(x * (1 + 1e-6 * self.calls) for x in super().backward_single_call(*args, **options))


def test_measure_reports_equal_gradients_of_every_mask():
    for mask in deterministic.MASKS:
        found = deterministic.measure(ReferenceKernel(), 192, (4, 2), 16, mask, rounds=1)
        assert found["equal_in_two_calls"]
        assert found["difference"] == 0
        assert min(found["milliseconds"], found["deterministic_milliseconds"], found["share"]) > 0


def test_measure_finds_a_kernel_that_varies():
    found = deterministic.measure(VaryingKernel(), 64, (2, 1), 16, "causal", rounds=1)
    assert not found["equal_in_two_calls"]
    assert found["difference"] > 0
