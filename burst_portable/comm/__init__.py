"""Transports: move buffers between ranks. `base` says what one is; `local` runs ranks as threads."""
