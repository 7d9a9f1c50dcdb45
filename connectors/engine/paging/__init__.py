"""Copies between vLLM's pages and contiguous slots: one operation per direction, whatever the layout."""
