"""Removal of the least important attention heads."""
