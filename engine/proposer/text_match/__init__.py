"""Drafts copied from text: the sequence itself, finished requests, the client's prediction."""
