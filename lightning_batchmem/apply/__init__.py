"""Set the batch size, gradient accumulation and learning rate."""
