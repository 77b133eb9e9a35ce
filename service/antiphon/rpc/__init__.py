"""gRPC services: one folder per protocol, and the parts common to all calls."""
