"""Measurements: a claim is a command."""
