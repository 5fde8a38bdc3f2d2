"""HAProxy as we want it: the program that Serve starts in its place, and the configuration that it gets."""
