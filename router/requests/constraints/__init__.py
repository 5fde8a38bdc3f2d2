"""What an answer must be: constraints on its text, under the names of any server."""
