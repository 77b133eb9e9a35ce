"""What runs a model's graphs: a runner for each lowering, and what is read out of states. Knows no request."""
