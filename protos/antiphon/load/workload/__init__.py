"""Workload of a load test: plan, texts, traces and arrival times."""
