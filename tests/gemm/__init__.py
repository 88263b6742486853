"""Tests of gemm."""
