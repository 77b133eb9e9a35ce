"""What every call has in common: limits, time limits, status, health and sockets."""
