"""The `antiphon` command: one file for each subcommand of a client."""
