"""LSTM encoder-decoder with attention, for comparison with the Transformer. It is trained, and not served."""
