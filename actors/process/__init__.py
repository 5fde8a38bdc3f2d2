"""The common parts of a pair's processes: thread, sockets, logging."""
