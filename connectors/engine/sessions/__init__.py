"""Sessions of requests: what their clients say of them, and how the index is told."""
