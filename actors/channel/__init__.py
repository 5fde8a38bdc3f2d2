"""The channel between a target and its draft process: messages, the two ends' tables, and the target's end."""
