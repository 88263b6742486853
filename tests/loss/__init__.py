"""Tests of losses over a vocabulary."""
