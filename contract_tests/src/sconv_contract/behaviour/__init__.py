"""The behaviour half: one class to subclass, and the command that runs it."""
