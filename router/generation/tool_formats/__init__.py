"""The forms of tool calls that models write: detection, grammars, and translation to JSON."""
