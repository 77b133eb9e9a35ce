"""What the service promises under overload, faults and bad clients: short here, long by `make reliability`."""
