"""The deployment engine, and Flower's services behind a front of this package.

`run_deployment` is the engine, `serve_superlink` and `run_supernode` are the services.

Imports: the core.
"""
