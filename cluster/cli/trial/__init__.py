"""A user's own traffic, replayed through drafts in processes of this machine."""
