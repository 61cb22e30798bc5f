"""The base class of backends, and every hook in plain vectorised torch."""
