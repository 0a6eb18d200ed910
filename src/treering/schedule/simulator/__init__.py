"""Simulation in virtual time: steps, events, timelines and lower bounds."""
