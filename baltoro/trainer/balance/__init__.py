"""Expert load: the router's selection bias."""
