"""Verbs that work out what a cache would have served: simulate, whatif."""
