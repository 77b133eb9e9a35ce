"""Programs beside the server: benchmarks, capacity planning and evaluation. Serving imports none of them."""
