"""Says which backend may be trusted: cases, an oracle in float64, and one table of tolerances."""
