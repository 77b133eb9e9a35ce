"""The explain graph of a bundle, and the weights that it shares with the other graphs."""
