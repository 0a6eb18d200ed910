"""Pictures of records: where their bytes are, how they are decoded, and what is kept of them."""
