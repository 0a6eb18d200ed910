"""Whole training steps on a CUDA device."""
