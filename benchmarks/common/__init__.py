"""Clocks, memory meters and reports that all benchmarks share."""
