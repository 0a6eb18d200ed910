"""Plans of where rollouts run: HistoPipe, its search, and baselines."""
