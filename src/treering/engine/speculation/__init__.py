"""What joins an engine to its drafter: drafts, feedback, and measured costs."""
