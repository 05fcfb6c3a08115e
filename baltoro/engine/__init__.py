"""Requests in, token deltas out; speaks ids only."""
