"""The target process: the engine's loop, its connection to the shell of the pair, and its reports to the index."""
