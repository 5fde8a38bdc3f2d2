"""The pairs as frontends use them: streams that survive the loss of a pair."""
