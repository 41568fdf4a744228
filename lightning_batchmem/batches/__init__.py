"""The loaders of a project come in; batches of any size, made of a few real samples, go out."""
