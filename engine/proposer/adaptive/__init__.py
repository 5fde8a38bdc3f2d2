"""The number of drafts of each sequence, from acceptance, cost and goodput."""
