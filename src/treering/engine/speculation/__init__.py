"""Speculative decoding: proposes drafts to the engine, reports acceptance to the drafter, and measures costs."""
