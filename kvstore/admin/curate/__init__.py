"""Verbs that choose what is kept, and what is near: pin, quota, sessions, warm."""
