"""fedpriv: differentially private federated optimization, simulated and deployed."""

__version__ = "0.1.0"
