"""`antiphon memory`: arithmetic of memory beside its measurement."""
