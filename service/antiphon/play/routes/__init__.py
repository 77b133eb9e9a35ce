"""Requests of the page: one file for each of its views, JSON in and JSON out."""
