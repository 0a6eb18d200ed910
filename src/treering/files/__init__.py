"""Files that survive what ends a process: errors as one line, atomic writes, locks, logs by step."""
