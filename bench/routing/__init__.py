"""What routing by prefix is worth and what it costs, on served or imitated pairs."""
