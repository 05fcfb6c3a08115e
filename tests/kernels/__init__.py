"""Kernels: each against a formula written out in the test."""
