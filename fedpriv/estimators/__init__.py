"""What a record contributes to a round, and how contributions are summed."""
