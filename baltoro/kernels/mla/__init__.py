"""Latent attention: expanded (prefill, training) and absorbed over a paged latent cache (decode)."""
