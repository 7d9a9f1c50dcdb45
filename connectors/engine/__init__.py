"""The modules by which all connectors read vLLM: its version, layout, tensors, steps and identity."""
