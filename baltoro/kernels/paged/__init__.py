"""Copies inside the paged arena: blocks of bytes, and new rows into KV pages."""
