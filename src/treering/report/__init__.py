"""The page of a run: what its folder holds, as figures, and one HTML file that shows them. No torch."""
