"""Connectors that record what requests ask for, and store and load nothing (`kv.observe`, `ec.observe`)."""
