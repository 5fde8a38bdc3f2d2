"""Reasoning steps: the draft writes a whole step and the target scores it. Only this package is not exact.

Everything outside it keeps the target's distribution. Nothing in it is built unless a deployment configures it, and
it touches only requests that ask for it.
"""
