"""Compute the numbers of a profile from recorded tables."""
