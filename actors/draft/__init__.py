"""The draft process: the actor, the model it loads, and its end of the channel."""
