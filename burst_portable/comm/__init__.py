"""Transports, which move buffers between ranks. `base` defines the contract; `local` runs ranks as threads."""
