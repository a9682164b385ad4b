"""NVIDIA: the `cuda` backend."""
