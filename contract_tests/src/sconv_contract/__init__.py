"""Checks that an sconv plugin keeps the contract; ``sconv verify`` is the command."""
