"""The number of drafts each sequence gets: acceptance, cost, goodput."""
