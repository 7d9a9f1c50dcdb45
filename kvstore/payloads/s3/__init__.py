"""Payloads as objects of a bucket."""
