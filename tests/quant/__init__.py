"""Tests of quantized weights."""
