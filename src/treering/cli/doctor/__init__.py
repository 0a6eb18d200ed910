"""`treering doctor`: whether an installation is right and fast, and whether a run's files are whole."""
