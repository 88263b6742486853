"""Attention bodies: prefill, decode and backward."""
