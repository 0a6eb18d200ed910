"""How much to draft: costs of verification, and the tokens that pay."""
