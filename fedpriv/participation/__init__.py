"""Participation: which records take part in which round, and whether the rounds are secret."""
