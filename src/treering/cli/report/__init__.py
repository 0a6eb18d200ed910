"""`treering report`: the page of a run."""
