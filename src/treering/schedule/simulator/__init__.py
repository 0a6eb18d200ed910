"""Runs in virtual time: steps, events, timelines and lower bounds."""
