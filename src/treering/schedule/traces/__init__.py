"""Traces to simulate: logged, replayed or drawn at random."""
