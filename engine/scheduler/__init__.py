"""Plans each step and applies its outcome to each sequence."""
