"""Server side of a run, as a Flower ServerApp.

`make_server_app` makes the ServerApp, `ReleaseStrategy` runs its rounds, and `ServerJournal` keeps their releases.

Imports: rooms from `silo` down.
"""
