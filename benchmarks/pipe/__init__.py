"""Scheduling policies on the runtime, against the simulator's predictions."""
