"""Backends, one folder per vendor. `base` defines the contract, `registry` finds them; see `backends/README.md`."""
