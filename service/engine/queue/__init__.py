"""Requests that wait: their order, and the bounds of the queue."""
