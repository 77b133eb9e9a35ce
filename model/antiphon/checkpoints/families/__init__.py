"""Public model families, one file each: conversion of their checkpoints to our model.

family.py defines the interface. To add a family, add a file with a module variable FAMILY to this package; family.py
finds it without a list.
"""
