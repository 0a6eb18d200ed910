"""TRL's trainers with shared prefixes against the stock ones."""
