"""How many drafts each sequence gets: acceptance, cost, goodput."""
