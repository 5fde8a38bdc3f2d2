"""The draft process: the model or class that drafts, and both ends of the channel to the target."""
