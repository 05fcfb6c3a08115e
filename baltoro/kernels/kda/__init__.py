"""Kimi Delta Attention: gate, chunk form (prefill and training), recurrent form (decode)."""
