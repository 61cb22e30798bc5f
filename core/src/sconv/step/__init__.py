"""One step: what the engine says of it, its metadata, and the checks of both."""
