"""Tests of refusals: each wrong call is refused in the words that it stands under."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cutekernels.errors import UnsupportedProblem

Calls = dict[str, Callable[[], Any]]  # the rule, as a regular expression, of each wrong call


def refused(calls: Callable[[], Calls]) -> Callable[..., None]:
    """Makes ``calls``, which gives them anew each time, a test of each."""

    @pytest.mark.parametrize("rule", calls())
    def test(rule: str) -> None:
        with pytest.raises(UnsupportedProblem, match=rule):
            calls()[rule]()

    return test
