"""Certificates, bearer tokens, and the authentication of every call."""
