"""Which records take part in which round, and who may know it."""
