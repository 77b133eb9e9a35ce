"""What is told of calls, engines and the process: metrics, log lines, spans."""
