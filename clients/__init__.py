"""Client side: a proxy to a silo's guard, or a simulated silo.

`flwr run` ships this room in its bundle, and `fedpriv run` expects it where the SuperNodes run.  `train`
answers a query, `SimulatedFederation` has the silos of a simulation, and `make_client_app` makes a ClientApp.

Imports: rooms from `silo` down.
"""
