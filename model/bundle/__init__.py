"""Bundles: the exported directory of a model, its manifest and its graphs. Imports no torch."""
