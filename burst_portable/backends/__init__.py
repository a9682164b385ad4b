"""Backends: one folder a vendor. `base` is the contract, `registry` finds them; see the root folder `backends/`."""
