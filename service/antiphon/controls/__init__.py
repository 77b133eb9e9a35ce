"""The sampling controls of one request, as one table that client, command line and service read.

`table.py` has a row for each control, `rules.py` the refused combinations, `control.py` the types of both.
Imports nothing but the standard library.
"""
