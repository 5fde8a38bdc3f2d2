"""The target process: the actor, its engine, and the sockets to shell and draft."""
