"""Constraints of one output: logits processors and stop strings."""
