"""Which proposer drafts for which sequence."""
