"""One rank's part of a model of transformers: which rows and columns of each weight, and which modules."""
