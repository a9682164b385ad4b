"""Compare the strategies of one call: correctness first, then time, memory and bytes. See `cli.bench`."""
