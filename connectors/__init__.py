"""vLLM connectors over the store: the only code here that imports torch and vLLM."""
