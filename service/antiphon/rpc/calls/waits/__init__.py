"""Waiting of calls: for their turn at the event loop, and for their own clients."""
