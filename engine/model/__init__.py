"""The model: loaded, cut into shards, computed over the KV pool."""
