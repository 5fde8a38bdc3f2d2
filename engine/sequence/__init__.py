"""Sequences, and the part of each that one step computes."""
