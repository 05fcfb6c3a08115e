"""Messages and pictures <-> token ids. No torch."""
