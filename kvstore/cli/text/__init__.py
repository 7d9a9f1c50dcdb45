"""Reports as text, a module per group of verbs."""
