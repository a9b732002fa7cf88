"""An empirical lower bound on what a run leaks, which must stay under the claim."""
