"""The decoder for CUDA: paged keys and values, captured passes, tokens drawn and verified where the logits are.

Importing this imports no triton: kernels are loaded by the decoder that runs them.
"""
