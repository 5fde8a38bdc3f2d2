"""Reasoning steps that the draft writes and the target judges as a whole: all that is not exact in this engine.

Everything outside this package keeps the target's distribution. Nothing in here is built unless a deployment configures
it, and nothing in here touches a request that has not asked for it.
"""
