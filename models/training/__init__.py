"""The training of the demo pair and of heads for its target: corpus, tokenizer, models, measurement and cards."""
