"""One report, many readers: everything is made from one dict with a schema version."""

from __future__ import annotations

from burst_portable.profiling.report.profile_report import Report

__all__ = ["Report"]
