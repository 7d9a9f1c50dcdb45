"""The router feed: the index's events as the KV events that routers read (docs/router-feed.md)."""
