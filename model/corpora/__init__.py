"""Corpora made from openly licensed packages of Debian."""
