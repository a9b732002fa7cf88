"""How far a record can move what a mechanism releases: the certificates."""
