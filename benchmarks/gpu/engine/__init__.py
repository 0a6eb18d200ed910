"""The engine on a CUDA device."""
