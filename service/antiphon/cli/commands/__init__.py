"""Subcommands of a client, one file each."""
