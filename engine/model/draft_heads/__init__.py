"""Heads: small networks on the target's hidden states that draft the tokens after the next one.

They are loaded from their published formats and run in the target's process. Their drafts are verified like all
others, so a bad head costs only speed.
"""
