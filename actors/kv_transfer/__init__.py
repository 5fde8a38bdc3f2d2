"""KV blocks on their way from a prefill replica to a pair: replies, transport, carriers."""
