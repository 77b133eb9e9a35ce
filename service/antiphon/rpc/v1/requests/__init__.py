"""Requests of antiphon.v1: messages read into requests of the engine."""
