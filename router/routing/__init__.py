"""The choice of a pair: policy, loads, prefix index, and Serve's router around them."""
