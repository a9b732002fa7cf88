"""Studies: sweeps over a scenario's cells, tuning, and their results."""
