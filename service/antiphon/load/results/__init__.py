"""Results of a load test: counts, rates and percentiles, and the search for a rate."""
