"""The pairs as a frontend sees them: streams that survive the loss of a pair."""
