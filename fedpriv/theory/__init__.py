"""What the papers' theorems ask for: formulas, and whether their conditions hold.  Imports no torch."""
