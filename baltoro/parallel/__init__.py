"""Who owns which slice."""
