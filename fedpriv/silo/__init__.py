"""Silo."""
