"""Anthropic's Messages API over the same generation."""
