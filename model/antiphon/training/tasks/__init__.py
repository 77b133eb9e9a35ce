"""Training tasks: translation, pre-training and fine-tuning, with their losses and scores."""
