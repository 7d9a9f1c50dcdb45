"""The bytes of a segment: its file and its codecs. docs/format.md specifies them."""
