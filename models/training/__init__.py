"""The parts of every training: corpus, tokenizer, loss, optimizer, checkpoints."""
