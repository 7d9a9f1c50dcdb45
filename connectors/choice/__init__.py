"""What loading takes, what computing takes, and which is chosen. Pure: no I/O, no threads, no vLLM."""
