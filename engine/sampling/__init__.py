"""From logits to tokens: every sampling parameter, the noise, grammars."""
