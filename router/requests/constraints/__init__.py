"""Constraints on the text of an answer, under the names of any server."""
