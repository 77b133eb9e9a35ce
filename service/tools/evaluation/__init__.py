"""Engines without the network: test sets scored, attention looked at."""
