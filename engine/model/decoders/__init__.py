"""Decoders: transformers' own modules for any family, and a faster one for Llama-shaped models."""
