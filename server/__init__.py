"""The server's side, shipped in a coordinator's bundle.

`server_app` makes the ServerApp, `ReleaseStrategy` runs its rounds, and `ServerJournal` keeps their releases.

Imports: rooms from `silo` down.
"""
