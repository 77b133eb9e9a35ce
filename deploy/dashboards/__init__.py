"""The Grafana dashboard as a program: `python -m deploy.dashboards` writes the file that deploy/ carries."""
