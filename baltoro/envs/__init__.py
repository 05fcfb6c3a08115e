"""Tasks, worlds and judges."""
