"""Local attention kernels: `contract` says what one is, `reference` plain torch, `triton` the portable ones."""
