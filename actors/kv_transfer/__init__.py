"""KV blocks on their way from a prefill replica to a pair: messages and carriers."""
