"""The process that keeps a fleet's store in bounds and in order."""
