"""Who serves a request: the two faces (OpenAI over HTTP, gRPC), and all text handling between them and the pairs.

Everything here works on token ids and text. It knows neither models nor tensors, and imports no torch.
"""
