"""Helpers that are independent of attention."""
