"""Tensors in, tensors out: each operation has a plain-torch reference that is its oracle and the CPU path."""
