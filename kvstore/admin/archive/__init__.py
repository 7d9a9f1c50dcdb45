"""Verbs that carry segments from store to store: export, import."""
