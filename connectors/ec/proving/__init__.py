"""Comparing the items that writers have stored before they are believed."""
