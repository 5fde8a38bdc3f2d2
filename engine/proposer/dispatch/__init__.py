"""The choice of a proposer for each sequence and pass."""
