"""Recurrent layers (Gated DeltaNet, Mamba-2) on forests: every run of tokens starts from its tree parent's state."""
