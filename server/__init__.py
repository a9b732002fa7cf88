"""The server's side, shipped in a coordinator's bundle: the Flower ServerApp, its strategy and its journal."""
