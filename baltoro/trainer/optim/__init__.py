"""Optimizers: per-head Muon, AdamW for the rest, QK-clip."""
