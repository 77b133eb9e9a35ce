"""Evaluation of models on test sets, with the engine and without the network."""
