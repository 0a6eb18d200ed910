"""vLLM as an engine of the loop."""
