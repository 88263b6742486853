"""Tests of guests: kernels that are not ours."""
