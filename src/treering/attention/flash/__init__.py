"""FlashAttention-4 on forests; `kernel` imports its package and is imported on first use."""

from treering.attention.flash.backend import flash_attention_on_forest as flash_attention_on_forest
