"""Functions that a call on the CPU calls, with and without gradients; its microseconds differ between machines."""

from __future__ import annotations

import sys

import torch

import cutekernels as ck

MOST = 200
"""167 and 171 on 2026-12-01; with gradients 391 by way of torch's dispatcher, which takes twice the time."""


def test_linear_calls_few_functions() -> None:
    for gradients in (False, True):
        x, weight = torch.randn(4, 8), torch.randn(8, 8, requires_grad=gradients)
        called = list[str]()
        for _ in range(2):  # the first call makes what others find
            called.clear()
            sys.setprofile(lambda frame, event, arg, called=called: called.append(event))
            try:
                ck.linear(x, weight)
            finally:
                sys.setprofile(None)
        assert sum(event in ("call", "c_call") for event in called) < MOST, gradients
