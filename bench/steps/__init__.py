"""What single steps of the engine cost: against the machine's limits, by precision, by determinism."""
