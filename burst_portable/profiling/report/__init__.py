"""Define `Report`, and the forms of a report: terminal, Markdown, HTML, JSON, Chrome trace."""

from __future__ import annotations

from burst_portable.profiling.report.profile_report import Report

__all__ = ["Report"]
