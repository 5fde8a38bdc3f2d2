"""Devices, and the place of each process on them."""
