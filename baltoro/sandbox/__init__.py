"""Runs code that we did not write."""
