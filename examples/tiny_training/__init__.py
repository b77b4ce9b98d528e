"""How `train_tiny.py` trains a `HybridLM`: the texts, the parallel forms of its layers, and the measures."""
