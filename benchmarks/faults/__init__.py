"""Faults of processes, files and disks while a run trains, and how each ends."""
