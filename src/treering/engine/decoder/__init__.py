"""Forward passes over loose tokens: a plain decoder, one for CPU and one for CUDA."""
