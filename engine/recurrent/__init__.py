"""Recurrent layers of transformers models over a pool of states."""
