"""Strategies: which tensors are communicated, and between which ranks. One file each; `registry` finds them by name."""
