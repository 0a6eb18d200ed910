"""Linear heads: in chunks of rows on any device, and on kernels of their own on CUDA."""
