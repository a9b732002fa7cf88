"""Speed, measured: `python -m benchmarks` (or `make bench`) prints every figure with the limit it is held against."""
