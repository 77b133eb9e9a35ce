"""Program that writes the Grafana dashboard in deploy/: `python -m deploy.dashboards`."""
