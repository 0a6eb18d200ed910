"""`treering inspect`: what sharing trajectory files hold, and what history would bring."""
