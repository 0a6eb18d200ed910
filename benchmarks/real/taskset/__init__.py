"""The calculator as a taskset of verifiers."""
