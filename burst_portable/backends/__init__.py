"""Backends, one folder per vendor. `base` is the contract, `selection` finds and chooses; see `backends/README.md`."""
