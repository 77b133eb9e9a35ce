"""Corpora that are made from Debian packages, for recipes whose texts come with no other data."""
