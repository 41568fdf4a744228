"""A training loop of the user comes in; its program and its plan go out."""
