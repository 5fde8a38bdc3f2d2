"""Passes of a few shapes, recorded once and replayed."""
