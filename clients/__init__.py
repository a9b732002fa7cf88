"""What runs at a silo: the Flower ClientApp and the silo's own protocol."""
