"""The log of verified positions, for tuning drafts: token ids and the target's likeliest tokens, without text."""
