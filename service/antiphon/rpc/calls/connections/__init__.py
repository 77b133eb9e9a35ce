"""Connections of clients: ports, limits of scrapes, and closing a connection."""
