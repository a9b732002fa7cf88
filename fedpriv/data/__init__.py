"""Data sets: fetched, verified, cached, spread over silos."""
