"""Tests of norms."""
