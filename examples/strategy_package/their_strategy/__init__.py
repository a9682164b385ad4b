"""An example: a strategy for burst_portable in a separate package. See README.md."""
