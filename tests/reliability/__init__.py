"""Promises of the service under overload, faults and bad clients: short here, long by `make reliability`."""
