"""The Ascend backend of sconv; ``sconv.load_backend("ascend", ...)`` finds it."""
