"""Tests of the kernel repository for Hugging Face's hub."""
