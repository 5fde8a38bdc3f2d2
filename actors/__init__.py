"""Ray shells around the engine: the processes of one draft-target pair, and the sockets between them."""
