"""Tests of norm_linear."""
