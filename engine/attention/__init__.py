"""Paged attention: one interface, and an implementation for each device."""
