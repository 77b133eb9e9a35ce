"""Training: recipes, data, tasks, losses and pruning."""
