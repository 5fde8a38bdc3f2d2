"""The log of verified positions, on which drafts are tuned: tokens, and what the target found likely. No text."""
