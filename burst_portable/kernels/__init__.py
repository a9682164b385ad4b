"""Define local attention kernels: `base` the contract, `reference` plain torch, `triton` the portable kernels."""
