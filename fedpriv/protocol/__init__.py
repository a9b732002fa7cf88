"""What silos and server say to each other over Flower."""
