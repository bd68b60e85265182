"""Which space is free, since when, and when the target gets it back."""
