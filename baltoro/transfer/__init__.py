"""Named bytes between processes."""
