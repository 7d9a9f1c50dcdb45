"""The status page, the metrics and the health checks of a cache: serve."""
