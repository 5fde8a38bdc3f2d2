"""HAProxy for untrusted clients: the program that Serve starts in its place, and its configuration."""
