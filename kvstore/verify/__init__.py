"""Payloads read and verified outside of a request, for `cache-admin` and the janitor."""
