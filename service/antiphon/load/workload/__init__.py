"""Workload of a load test: texts, traces and arrival times."""
