"""The libraries that compute: each engine is one file."""
