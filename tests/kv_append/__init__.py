"""Tests of kv_append."""
