"""Trials on hardware that the tests do without. Nothing of this is shipped."""
