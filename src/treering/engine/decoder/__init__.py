"""Run forward passes over batches of tokens: a plain torch decoder, a fused one for CPU and one for CUDA."""
