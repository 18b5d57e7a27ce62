"""Shipped reward functions. Nothing here loads torch."""
