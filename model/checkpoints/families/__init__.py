"""Public model families, one file each: how a checkpoint of theirs becomes one of ours.

family.py says what a family is. A new one is a file beside the others with a FAMILY in it: no list names them.
"""
