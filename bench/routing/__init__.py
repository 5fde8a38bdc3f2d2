"""The worth and the cost of routing by prefix, on served or imitated pairs."""
