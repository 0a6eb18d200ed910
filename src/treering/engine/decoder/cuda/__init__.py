"""The decoder for CUDA: kernels of our own, CUDA graphs, and sampling and verification on the device.

Importing this package does not import triton; the modules with kernels do.
"""
