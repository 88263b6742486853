"""Tests of tuner."""
