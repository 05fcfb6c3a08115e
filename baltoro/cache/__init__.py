"""Bytes that outlive a step: pages, slots and their books."""
