"""The bundled demo pair: training, measurement and description of its corpus, tokenizer, target and draft.

The server imports nothing here; it only loads the checkpoints under `models/demo/`.
Dimension letters are defined in `engine/__init__.py`: B sequences, T tokens, K draft tokens, V vocabulary, L layers.
"""
