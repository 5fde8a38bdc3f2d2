"""Request bodies: their schemas, their checks, and the sequences they become."""
