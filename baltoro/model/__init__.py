"""K3, once, for serving and training."""
