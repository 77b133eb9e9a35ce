"""Everything about a model that is not serving. Import submodules; this file imports nothing."""
