"""Heads: small networks on the target's hidden states that say what comes after the next token.

They are loaded from the formats in which they are published, and live in the target's process. What they draft is
verified like any other draft, so a bad head costs speed and nothing else.
"""
