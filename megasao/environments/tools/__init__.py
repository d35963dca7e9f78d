"""Tools that a model calls: their schemas, what they do, and how each family of models writes a call."""
