"""What every training needs: corpus, tokenizer, loss, optimizer, checkpoints."""
