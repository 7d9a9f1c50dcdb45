"""Estimates of loading and of computing, and the choice between them. Pure: no I/O, no threads, no vLLM."""
