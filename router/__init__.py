"""The two frontends (OpenAI over HTTP, gRPC), all text handling, and the choice of a pair for each request.

Everything here works on token ids and text. It knows neither models nor tensors, and imports no torch.
"""
