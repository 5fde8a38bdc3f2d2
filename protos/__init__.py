"""The wire contract: the messages between processes, independent of how their contents are computed."""
