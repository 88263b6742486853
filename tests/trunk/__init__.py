"""Tests of trunk."""
