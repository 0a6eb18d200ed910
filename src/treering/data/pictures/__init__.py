"""Pictures of records: where their bytes are, how they are decoded, and what the model's processor makes of them."""
