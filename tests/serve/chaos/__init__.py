"""Faults and overload in a served application, while seeded streams must not notice."""
