"""Train on forests: objectives on per-branch values, the exact tree step, and the training loop."""
