"""Engines: ways to run the same cells."""
