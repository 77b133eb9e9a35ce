"""Size of a replica: memory term by term, resources, and their report."""
