"""Models: shape, text, bundle, export, checkpoints and training, all except serving. This file imports nothing."""
