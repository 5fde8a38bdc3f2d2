"""The engine's counters, step times and measured rates."""
