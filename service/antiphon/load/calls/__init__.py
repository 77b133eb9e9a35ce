"""Calls of a load test: sent in open loop, by one process each, and recorded."""
