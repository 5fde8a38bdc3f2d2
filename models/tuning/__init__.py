"""Tuning of a draft on the log of its deployment (`engine.stats.position_log`): what `outrider tune` runs."""
