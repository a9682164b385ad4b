"""Run the conformance suite as tests: one test per trial."""

from burst_portable.conformance.pytest import backend_checks


@backend_checks("theirs", ranks=3, effort="quick", only=["claims", "kernels", "transport", "attention", "blind"])
def test_conformance(check):
    check()
