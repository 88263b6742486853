"""Arguments of attention's public functions: numbers, windows and configs.

Every refusal names rule, value and remedy.
"""

from __future__ import annotations

import math
from operator import index
from typing import Any

from torch import Tensor

from cutekernels.errors import InvalidConfig, UnsupportedProblem
from cutekernels.op import Config
from cutekernels.ops.attention.problem import UNLIMITED
from cutekernels.ops.shared.checks import quote

# What torch raises for arguments that fit no schema or backend, and Python for those that are no tensors.
FOREIGN = (AttributeError, TypeError, RuntimeError)


# ---- numbers --------------------------------------------------------------------------------------------


def default_scale(q: Tensor) -> float:
    return 1.0 / math.sqrt(q.shape[-1]) if q.dim() and q.shape[-1] else 1.0


def check_scale(scale: float) -> None:
    if not 0.0 < scale < math.inf:
        raise UnsupportedProblem(f"scale must be above 0 and finite; it is {scale}: negate q for the opposite sign")


def cap_of(softcap: float) -> float:
    cap = number("softcap", softcap)
    if not 0.0 < cap < math.inf:
        raise UnsupportedProblem(f"softcap must be above 0 and finite; it is {softcap}: leave it out for none")
    return cap


def number(name: str, value: Any) -> float:
    if isinstance(value, Tensor):  # float() would drop its gradient and wait for its GPU
        raise UnsupportedProblem(
            f"{name} must be a number, and has no gradient; it is {quote(value)}: pass its item()"
            + (", or multiply q by it" if name == "scale" else "")
        )
    if not isinstance(value, (bool, str, bytes)):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            pass
    raise UnsupportedProblem(f"{name} must be a number; it is {quote(value)}: pass a float, or None for the default")


def sides_of(window: Any, *, later: bool = True) -> tuple[int, int]:
    """The window's ``(left, right)``, -1 for no limit. ``later``: whether there are keys behind a query's own."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        form = "(left, right), each" if later else "(left, None), left"
        raise UnsupportedProblem(f"window must be {form} a number of keys or None; it is {window!r}")
    left, right = _side(window[0]), _side(window[1])
    if right > 0 and not later:
        raise UnsupportedProblem(f"window's right side must be None: there are no later keys; it is {right}")
    return left, right


def _side(side: Any) -> int:
    if side is None:
        return -1
    if not isinstance(side, bool):
        try:
            keys = index(side)
        except TypeError:
            keys = -1
        if 0 <= keys < UNLIMITED:
            return keys
    raise UnsupportedProblem(
        f"a side of window must be an integer from 0 up to 2^30; it is {side!r}: write None for no limit"
    )


def text_of(config: Config | str, kind: type[Config]) -> str:
    check_config(config, kind)
    return str(config)


def check_config(config: object, kind: type[Config]) -> None:
    if not isinstance(config, (str, kind)):
        raise InvalidConfig(f"config must be of {kind.__name__} or its text; it is {config!r}: leave it out to choose")
