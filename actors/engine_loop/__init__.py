"""An engine in a thread of its own, and what it reports after each step."""
