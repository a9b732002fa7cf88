"""A silo's guard for Flower apps of others: their local training becomes noisy steps that the guard answers.

    from fedpriv.flower import guard_of

    guard = guard_of(context, Path(__file__).with_name("guard.toml"))
    arrays = guard.train(msg.content["arrays"], msg.content["config"]["server-round"])

The app never sees a record, and the server's strategy stays what it is: docs/existing-flower-app.md.
"""

from fedpriv.flower.guarded import SiloGuard, guard_of

__all__ = ["SiloGuard", "guard_of"]
