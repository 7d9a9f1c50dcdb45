"""The worker half of the KV connector, which moves blocks between the paged cache and the store."""
