"""Strategies: what moves. One file each; `registry` finds them by name."""
