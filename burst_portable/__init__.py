"""Exact attention over a sequence that no single device can hold."""

__version__ = "0.1.0"
