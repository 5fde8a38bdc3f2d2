"""The two frontends (OpenAI over HTTP, gRPC), all text handling, and the choice of a pair for each request.

This package works on token ids and text. It has no models or tensors, and does not import torch.
"""
