"""Text to token ids and back. Imports no torch."""
