"""What a race is between: one class per way to generate, the rounds, and the table of results."""
