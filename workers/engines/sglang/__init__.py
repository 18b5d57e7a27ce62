"""Sampling by an SGLang server, which may run in its own Python environment."""
