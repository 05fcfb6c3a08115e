"""Routing, SiTU-GLU, and the grouped expert product."""
