"""Carries what connectors count to vLLM's statistics, and what became of requests to the index's journal."""
