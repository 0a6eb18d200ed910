"""Distillation on trees against distillation on flat sequences."""
