"""Work-arounds for gRPC, one a module, each with its upstream issue, cause, cost and condition for removal."""
