"""How few trials a search needs, side by side with other samplers."""
