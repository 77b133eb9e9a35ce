"""Measures of trained models that several experiments use."""
