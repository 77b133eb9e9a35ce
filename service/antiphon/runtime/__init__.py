"""Runners of a model's graphs. They know arrays and blocks, and no request."""
