"""Experiments with the models of this project."""
