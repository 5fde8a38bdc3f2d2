"""Heads: small networks on the target's hidden states that draft the tokens after the next one.

They are loaded from the formats in which they are published, and run in the target's process. Their drafts are
verified like any others, so a bad head costs speed and nothing else.
"""
