"""What a person sees of a running command: a panel on a terminal, plain lines elsewhere."""
