"""From a cell of a scenario to a plan, and a round of it."""
