"""Common code of families: BART-like and BERT-like architectures."""
