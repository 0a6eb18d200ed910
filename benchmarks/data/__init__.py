"""Large data files: memory and processor time of the commands that read them."""
