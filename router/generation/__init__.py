"""One client request in flight: token chunks become text, tool calls and usage."""
