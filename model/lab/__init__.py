"""Experiments that hold the lectures' claims against this code: memory, and what one knob changes."""
