"""Text to token ids and back, and chats to prompts; no torch."""
