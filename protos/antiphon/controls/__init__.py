"""The sampling controls of one request, as one table that client, command line and service read.

`table.py` has a row for each control, `rules.py` the combinations that are refused, `control.py` the terms of both.
Imports nothing but the standard library.
"""
