"""Routing and permutation for mixture of experts."""
