"""What the two language-model examples share: the data, the models, the optimizer, the run."""
