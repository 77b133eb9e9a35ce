"""Kernels in Triton, for the nodes of nodes.py. Compiled ahead of time: no server imports this package.

A kernel receives sizes and a set of flags at run time, so that one compiled kernel serves every model. Only the element
type and the width of a head (as the next power of two) are compiled in.
"""
