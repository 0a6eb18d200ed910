"""Earlier rollouts of a prompt and drafts from them: index, store, draft. Numpy and numba only, no torch."""
