"""Parts common to all calls: limits, time limits, status, health and sockets."""
