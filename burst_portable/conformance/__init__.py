"""Test a backend against dense attention in float64, and report the results.

>>> from burst_portable.conformance import check_backend
>>> report = check_backend("cpu", ranks=2, coverage="quick", only=["claims"])
>>> report.ok
True

See `suite.check_backend`, `report.Report`, and `pytest.backend_checks` for the tests of another package.

===================================  ===========================================================================
`suite`                              `check_backend`: runs the tests that `selection` lists, and returns a report.
`runner`, `parallel_runner`          run the tests one after another; in several processes.
`smallest_case`                      searches for the smallest case that fails like a failed one.
`base`                               `BackendUnderTest`, `TestCase`, `Outcome` and `Check`, a group of tests.
`checks/`                            the groups, one file for each subject. They use the next six rows:
`cases`                              `Case`: a choice of mask, layout, strategy, ranks, heads, dtype and options.
`oracle`                             the exact results of a case, in float64.
`running`, `kernel_runs`             run a case over ranks that are threads; on one kernel.
`processes`                          runs ranks that are processes, with the backend's own transport.
`exchanges`                          what these ranks send to each other to test a transport.
`fresh_memory`                       fills fresh memory with NaN in all tests.
`report`                             `Report` as JSON, JUnit XML and Markdown.
`pytest`                             the tests as tests of another package.
===================================  ===========================================================================
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
