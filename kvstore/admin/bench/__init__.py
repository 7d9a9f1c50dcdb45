"""The verb that measures this machine, index and payload store: bench."""
