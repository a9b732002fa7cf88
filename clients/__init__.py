"""The client's side, shipped in a coordinator's bundle: a thin proxy to a silo's guard, or a simulated silo."""
