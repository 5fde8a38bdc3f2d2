"""Drafts copied from text: from the sequence itself, from finished requests, or from the client's prediction."""
