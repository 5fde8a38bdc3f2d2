"""Forms in which models write tool calls: their recognition, their grammars and what they mean as JSON."""
