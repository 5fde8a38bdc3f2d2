"""Verifiers turn the target's logits and a draft into tokens with exactly the target's distribution.

*Accepted* tokens are drafts that pass verification. The *recovered* token replaces the first rejected draft. The
*bonus* token follows if all drafts are accepted. A pass commits the accepted tokens and one recovered or bonus token.
"""
