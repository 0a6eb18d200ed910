"""How much to draft: costs of verification, and which tokens pay."""
