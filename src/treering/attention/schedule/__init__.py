"""Which rectangles of queries and keys the `segments` backend computes, and which pairs in them are visible."""
