"""Training of models: recipes, data, tasks, losses and pruning."""
