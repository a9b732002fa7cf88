"""Server side, shipped in a coordinator's bundle.

`make_server_app` makes the ServerApp, `ReleaseStrategy` runs its rounds, and `ServerJournal` keeps their releases.

Imports: rooms from `silo` down.
"""
