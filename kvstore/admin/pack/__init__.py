"""Verbs about prefix packs: archives of what prompts compute to, made before anybody asks."""
