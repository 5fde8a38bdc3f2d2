"""What is computed in each step, and what a step's outcome means for each sequence."""
