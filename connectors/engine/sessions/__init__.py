"""Sessions of requests: their clients' hints, and the reports to the index."""
