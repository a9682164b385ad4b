"""Define backends, one folder per vendor. `base` is the contract, `selection` finds and chooses backends.

See docs/writing_a_backend.md.
"""
