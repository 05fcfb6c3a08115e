"""Speculation: several tokens of a request through the model in one step, and how many of them stay."""
