"""The plan of each step, and the consequences of its outcome for each sequence."""
