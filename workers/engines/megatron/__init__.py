"""Training by Megatron-core."""
