"""Shipped environments."""
