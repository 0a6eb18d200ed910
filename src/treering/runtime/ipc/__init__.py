"""Child processes, their messages and shared memory."""
