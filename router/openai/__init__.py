"""OpenAI's HTTP API: endpoints, responses, streams, errors."""
