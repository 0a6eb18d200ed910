"""What a rehearsed rollout keeps of its tokens, and what it saves."""
