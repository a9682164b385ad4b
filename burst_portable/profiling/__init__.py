"""Profile distributed attention; see docs/profiling.md."""
