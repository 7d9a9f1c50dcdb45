"""The verb that says whether a cache, or a larger one, pays: advise."""
