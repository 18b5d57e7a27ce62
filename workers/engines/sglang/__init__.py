"""Sampling by SGLang's server, in an environment of its own perhaps."""
