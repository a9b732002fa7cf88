"""Client side of a run, as a Flower ClientApp: a proxy to a silo's guard, or a simulated silo.

`train` answers a query, `SimulatedFederation` has the silos of a simulation, and `make_client_app` makes a
ClientApp.

Imports: rooms from `silo` down.
"""
