"""Training a network from arrays, training a classifier on a frozen one, and writing the result."""
