"""Tree attention on a CUDA device."""
