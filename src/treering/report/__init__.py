"""Page of a run: the data of its folder as figures, and one HTML file that shows them. Imports no torch."""
