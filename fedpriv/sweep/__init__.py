"""Running the cells of a scenario, and the folder it leaves."""
