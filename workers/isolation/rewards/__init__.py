"""Reward functions, and the processes beside a rank that run them. Nothing here loads torch."""
