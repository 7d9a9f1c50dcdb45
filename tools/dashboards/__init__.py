"""The chart's dashboards: `python -m tools.dashboards` writes helm/files/dashboards/*.json."""
