"""Making of text corpora from openly licensed sources, for pre-training. Imports no torch."""
