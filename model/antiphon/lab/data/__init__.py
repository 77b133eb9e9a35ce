"""Data that experiments write themselves."""
