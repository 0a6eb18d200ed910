"""What Treering claims about speed, measured: one file per claim, with its best honest baseline in the same run."""
