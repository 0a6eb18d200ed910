"""The running batch as arrays, and the inputs and outputs of one step."""
