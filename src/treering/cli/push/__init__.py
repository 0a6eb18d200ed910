"""`treering push`: uploads a checkpoint and its model card to the Hugging Face hub."""
