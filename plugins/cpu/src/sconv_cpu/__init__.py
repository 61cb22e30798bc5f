"""The CPU backend of sconv; ``sconv.load_backend("cpu", ...)`` finds it."""
