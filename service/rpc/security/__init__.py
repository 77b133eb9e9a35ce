"""Certificates, bearer tokens, and the check before every call."""
