"""Bundles: the directory of an exported model, its manifest and its graphs. Imports no torch."""
