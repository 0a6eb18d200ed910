"""Computations of `treering inspect`: recordings, and replays of a drafter over them."""
