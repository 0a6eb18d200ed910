"""What `make gpu` measures on a CUDA device."""
