"""How a model is sharded over ranks, and what ranks exchange."""
