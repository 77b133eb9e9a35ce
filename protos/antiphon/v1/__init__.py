"""Generated stubs of the antiphon.v1 contract."""
