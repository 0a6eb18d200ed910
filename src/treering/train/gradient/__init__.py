"""The exact tree step: forests in, gradients of all branches out."""
