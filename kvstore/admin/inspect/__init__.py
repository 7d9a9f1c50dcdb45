"""Verbs that look: status, ls, namespaces, show, stats, top, events."""
