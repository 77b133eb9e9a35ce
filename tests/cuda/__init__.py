"""Tests of the operators for GPUs without a card, run by `make test-cuda` in .venv-cuda, because they need Triton."""
