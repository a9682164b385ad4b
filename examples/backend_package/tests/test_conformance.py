"""All that a backend's own test-suite needs: one test a trial, reported and picked like any other."""

from burst_portable.conformance.pytest import backend_checks


@backend_checks("theirs", ranks=3, effort="quick", only=["claims", "kernels", "transport", "attention", "blind"])
def test_conformance(check):
    check()
