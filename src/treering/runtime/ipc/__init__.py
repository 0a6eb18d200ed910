"""Child processes, their messages, and memory that they share."""
