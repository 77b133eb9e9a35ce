"""Admission of requests, and the choice of those that run at the next step."""
