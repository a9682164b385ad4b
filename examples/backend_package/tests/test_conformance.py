"""Run the conformance suite as tests: one test per trial."""

from burst_portable.conformance.pytest import backend_checks


@backend_checks(
    "theirs", ranks=3, coverage="quick", only=["claims", "kernels", "transport", "attention", "fully_masked"]
)
def test_conformance(check):
    check()
