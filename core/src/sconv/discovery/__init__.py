"""Which backends are installed, whether they can run here, and whether they conform."""
