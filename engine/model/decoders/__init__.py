"""Decoders: transformers' own modules for any family, and a faster one for described families."""
