"""Files that stay whole when a process is killed: atomic writes, locks, and logs by step."""
