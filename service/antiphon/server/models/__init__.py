"""Models of a server: their settings, memory, loading and unloading."""
