"""Model files: names, formats, and what a node lacks of them."""
