"""The client's side, shipped in a coordinator's bundle: a thin proxy to a silo's guard, or a simulated silo.

`train` answers a query, `SimulatedFederation` has the silos of a simulation, and `client_app_of` makes a
ClientApp.

Imports: rooms from `silo` down.
"""
