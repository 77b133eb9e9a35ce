"""gRPC services: one folder for each protocol, and what every call has in common."""
