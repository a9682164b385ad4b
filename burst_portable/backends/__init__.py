"""Backends, one folder per vendor. `base` is the contract, `selection` chooses. See docs/writing_a_backend.md."""
