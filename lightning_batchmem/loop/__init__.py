"""A training loop of the user comes in; its session and its plan go out."""
