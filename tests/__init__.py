"""The package's shadow: one folder per room, one file per module."""
