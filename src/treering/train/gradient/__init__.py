"""The exact tree step: takes forests, returns the gradients of all their branches."""
