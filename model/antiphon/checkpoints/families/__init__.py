"""Public model families: conversion of their checkpoints to our model.

family.py defines the interface. To add a family, add a `Family` at the top level of the module of its
architecture, or of a new module; family.py finds it without a list.
"""
