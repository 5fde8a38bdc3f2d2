"""Training and measurement of EAGLE-3 and Medusa heads."""
