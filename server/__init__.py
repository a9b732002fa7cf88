"""Server side, which `flwr run` ships in its bundle, and which `fedpriv run` expects at the SuperLink.

`make_server_app` makes the ServerApp, `ReleaseStrategy` runs its rounds, and `ServerJournal` keeps their releases.

Imports: rooms from `silo` down.
"""
