"""The fused decoder for CPU."""
