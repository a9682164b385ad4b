"""Test a backend against dense attention in float64, and report the results.

>>> from burst_portable.conformance import check_backend
>>> report = check_backend("cpu", ranks=2, coverage="quick", only=["claims"])
>>> report.ok
True

See `suite.check_backend`, `report.Report`, and `pytest.backend_checks` for the tests of another package.
"""

from importlib import import_module
from typing import TYPE_CHECKING

_MODULES = {"check_backend": "suite", "Report": "report", "Result": "report", "Case": "cases"}

__all__ = ["Case", "Report", "Result", "check_backend"]

if TYPE_CHECKING:
    from burst_portable.conformance.cases import Case as Case
    from burst_portable.conformance.report import Report as Report
    from burst_portable.conformance.report import Result as Result
    from burst_portable.conformance.suite import check_backend as check_backend

else:  # hidden from type checkers: they would accept any name

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module 'burst_portable.conformance' has no attribute {name!r}")
        return getattr(import_module(f"burst_portable.conformance.{_MODULES[name]}"), name)
