"""The contenders of a race: one class per way to generate, the rounds, and the table of results."""
