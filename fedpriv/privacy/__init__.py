"""What a run promises, to whom, and what that costs."""
