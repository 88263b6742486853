"""Tests of moe."""
