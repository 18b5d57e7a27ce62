"""What runs on a GPU: the worker loop, roles, engines and node functions."""
