"""The contract of an index, for requests and for maintenance, as suites for its parts."""
