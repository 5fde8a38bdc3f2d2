"""Plan by which a model is sharded over ranks, and the exchanges of a rank."""
