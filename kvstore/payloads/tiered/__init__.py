"""A bounded folder on the node's disk in front of a payload store that all nodes share."""
