"""Generators of the references: of the commands, and of the settings."""
