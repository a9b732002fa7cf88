"""Messages between silos and server over Flower, and frames on Unix sockets.

`query_content` and `release_content` build the two messages of a round.  `Refusal` is a reply that gives the
reason why a silo releases nothing.

Imports: rooms from `claims` down.
"""
