"""Objects of a training program come in; their contents are restored in place."""
