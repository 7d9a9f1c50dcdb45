"""Allow lists: the options, load formats and files of which it is known what they do to an engine's bytes."""
