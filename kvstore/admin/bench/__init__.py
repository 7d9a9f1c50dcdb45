"""The verb that measures index and payload store: bench."""
