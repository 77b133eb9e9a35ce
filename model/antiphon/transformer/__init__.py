"""The Transformer in PyTorch: layers, positions, heads and greedy decoding."""
