"""An ingress replica's metrics, and the text that /metrics answers with."""
