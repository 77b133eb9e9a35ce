"""Which models a server holds: loaded from bundles, counted against the memory, changed while it runs."""
