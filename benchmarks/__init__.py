"""What Treering claims about speed, measured: one file per claim, each with the best honest baseline in the same run."""
