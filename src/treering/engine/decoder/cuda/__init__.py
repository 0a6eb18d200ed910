"""Decode on CUDA: paged keys and values, CUDA graphs, and sampling and verification on the device.

Importing this package does not import triton; the modules with kernels do.
"""
