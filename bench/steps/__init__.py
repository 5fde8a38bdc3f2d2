"""The cost of single steps of the engine: against the machine's limits, by precision, by determinism."""
