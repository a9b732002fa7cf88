"""Messages between silos and server over Flower."""
