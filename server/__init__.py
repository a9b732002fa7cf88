"""What runs at the server: the Flower ServerApp and its strategy."""
