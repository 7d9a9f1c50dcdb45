"""Comparing what writers have stored before it is believed."""
