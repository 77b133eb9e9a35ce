"""Requests, sampling controls, events and errors: plain data that imports nothing else of the service."""
