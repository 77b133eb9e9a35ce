"""GenerateMany: many requests over one call."""
