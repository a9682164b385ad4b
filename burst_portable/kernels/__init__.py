"""Local attention kernels: `contract` says what one is, `reference` is the oracle, `triton` the portable ones."""
