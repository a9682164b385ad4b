"""Integrations with model libraries: unedited models with a sharded sequence."""
