"""An example: a strategy for burst_portable in a package of its own. See README.md."""
