"""Tests of rope."""
