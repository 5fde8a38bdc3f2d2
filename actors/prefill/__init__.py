"""The prefill replica: a Serve deployment that reads prompts for the pairs."""
