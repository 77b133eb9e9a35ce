"""Sections of `antiphon bench`: each measures one subject and returns its findings."""
