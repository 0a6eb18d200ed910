"""Other projects that benchmarks compare with, in an environment of their own."""
