"""The profiler: where the time of a distributed attention went. See docs/profiling.md."""
