"""Backends, one folder per vendor. `base` defines the contract, `selection` finds and chooses them; see `backends/README.md`."""
