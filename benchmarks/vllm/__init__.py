"""Drafts from history inside vLLM, against vLLM's own drafters that need no model."""
