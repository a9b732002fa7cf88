"""Messages between silos and server over Flower, and frames on a site's sockets.

`query_content` and `release_content` make the two messages of a round.  `Refusal` is a guard's answer in words.

Imports: rooms from `claims` down.
"""
