"""Integers."""
