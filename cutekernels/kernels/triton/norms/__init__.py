"""Norms and their gradients."""
