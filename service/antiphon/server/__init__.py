"""The process: settings, ports, models and life cycle."""
