"""A server of several processes: workers that share the gRPC port, and a supervisor that owns everything else."""
