"""The server. Import submodules; this file imports nothing, and nothing below it imports torch."""
