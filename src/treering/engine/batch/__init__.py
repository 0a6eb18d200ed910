"""The running rollouts as arrays, and what one step computes of them."""
