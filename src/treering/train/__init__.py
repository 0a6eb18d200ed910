"""Training on forests: objectives as functions of per-branch values, the exact tree step, the loop around it."""
