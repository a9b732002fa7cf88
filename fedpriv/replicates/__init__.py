"""Many runs computed as one: numbers with an entry for each."""
