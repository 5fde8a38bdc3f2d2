"""The plan that shards a model over ranks, and a rank's exchanges."""
