"""One file per family of tasks."""
