"""What runs inside the child processes."""
