"""What an engine holds: a loaded backend, the module of a model, plans of memory."""
