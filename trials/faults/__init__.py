"""The fault matrix: what requests see, and what is lost, while the parts beneath an engine fail."""
