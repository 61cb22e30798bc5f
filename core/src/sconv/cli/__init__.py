"""The command line: ``sconv`` and its subcommands."""
