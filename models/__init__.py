"""The bundled demo pair: how its corpus, tokenizer, target and draft are made, measured and described.

Nothing here is imported by the server; the server only loads the checkpoints under `models/demo/`.
Dimension letters are those of `engine/__init__.py`: B sequences, T tokens, K draft tokens, V vocabulary, L layers.
"""
