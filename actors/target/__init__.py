"""The target process: the actor, its engine, and the sockets for shell and draft."""
