"""A namespace in several shards: more than one node of a Redis Cluster answers for it."""
