"""An ingress replica's metrics, and the text of /metrics."""
