"""Metrics, log lines and spans of calls, engines and the process."""
