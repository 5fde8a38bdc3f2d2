"""Results of passes: counters, rates, costs and acceptance, and the draft lengths that follow from them."""
