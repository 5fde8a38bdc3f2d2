"""Tuning of a draft on the log of its deployment (`engine.position_log`): what `outrider tune` runs."""
