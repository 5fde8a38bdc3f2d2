"""An engine in a thread of its own, and its reports after each step."""
