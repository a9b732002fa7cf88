"""Sums of silos' messages that a server learns without learning any one of them.

| file | what |
|---|---|
| `grid` | a simulation's real vectors as integers modulo 2^64 |
| `masks` | pairwise masks that cancel in the sum of all silos' messages |
| `identity` | signatures by which silos know each other's keys, whatever the server relays |

Source: Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving machine learning": its one-time
pads with keys agreed on by pairs, against parties that follow the protocol, and without its secret sharing, which
recovers from drop-outs: here a silo that drops out ends the run.
"""
