"""Faults in a served application, and more load than it can take, beside streams that must not notice."""
