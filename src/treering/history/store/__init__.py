"""Earlier rollouts by prompt and version: snapshots in memory, files on disk."""
