"""The plan of a distributed attention as pure data, made before any communication. Imports no torch."""
