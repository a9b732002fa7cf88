"""Speed, measured: `make bench` prints every figure with the limit it is held against."""
