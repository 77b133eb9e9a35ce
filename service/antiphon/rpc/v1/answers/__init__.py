"""Answers of antiphon.v1: messages from the engine's events, and the pace of sending them."""
