"""Sampling by vLLM in the training process."""
