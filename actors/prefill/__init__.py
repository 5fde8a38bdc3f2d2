"""The prefill replica: a Serve deployment that prefills prompts for the pairs."""
