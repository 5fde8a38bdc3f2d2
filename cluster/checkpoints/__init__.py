"""Model files: names, formats, and the files that a node lacks."""
