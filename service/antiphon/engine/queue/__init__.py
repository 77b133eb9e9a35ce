"""Waiting requests: their order, and the bounds of the queue."""
