"""Says which backend may be trusted: cases, an oracle in float64, one table of tolerances, and a report.

>>> from burst_portable.conformance import check_backend
>>> report = check_backend("cpu", ranks=2, effort="quick", only=["claims"])
>>> report.ok
True

See `suite.check_backend`, `report.Report`, and `pytest.backend_checks` for a test-suite of your own.
"""

from importlib import import_module
from typing import TYPE_CHECKING

_HOMES = {"check_backend": "suite", "Report": "report", "Result": "report", "Case": "cases"}

__all__ = ["Case", "Report", "Result", "check_backend"]

if TYPE_CHECKING:
    from burst_portable.conformance.cases import Case as Case
    from burst_portable.conformance.report import Report as Report
    from burst_portable.conformance.report import Result as Result
    from burst_portable.conformance.suite import check_backend as check_backend

else:  # of type checkers unseen: to them, it would make every misspelt name an object

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'burst_portable.conformance' has no attribute {name!r}")
        return getattr(import_module(f"burst_portable.conformance.{_HOMES[name]}"), name)
