"""vLLM behind the engine protocol."""
