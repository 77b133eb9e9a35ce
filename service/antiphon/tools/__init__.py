"""Programs that are not part of serving: benchmarks, capacity planning and evaluation. Serving imports none of them."""
