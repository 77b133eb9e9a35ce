"""OpenTelemetry spans of finished calls."""
