"""The antiphon.v1 protocol: its messages to domain objects and back."""
