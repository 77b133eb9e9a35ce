"""Operators: declarations, eager implementations, native code, and the sampling and cache layout that they define."""
