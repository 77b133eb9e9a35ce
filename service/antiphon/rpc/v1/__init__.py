"""The antiphon.v1 protocol: converts its messages to domain objects and back."""
