"""The wire contract: what crosses between processes, and nothing of how it is computed."""
