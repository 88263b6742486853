"""The numbers of the models of routing and permutation: docs/notes/moe.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Route:
    """Instructions of a warp, counted; nothing was fitted."""

    slots: int = 4  # warp instructions per clock of an SM
    dependent: float = 3.4  # clocks: from one instruction of a chain to the next, where nothing hides it
    occupied: int = 2  # of the warps that an SM holds, one in so many is there
    start: int = 100  # instructions: a program, whatever its size
    softmax: int = 20  # instructions: an element of a thread
    round: int = 3  # instructions: an element of a thread in a round that finds one expert
    rounds: int = 10  # instructions: a round that finds one expert, whatever its size
    compared: int = 8  # instructions: an element of a thread in a step of a sort
    gradient: int = 10  # instructions: an element of a thread in the gradient


@dataclass(frozen=True)
class Permute:
    """Clocks of one program; no sweep of it is recorded."""

    resident: int = 4  # programs of an SM
    count: int = 1000  # clocks: to count a block, whatever its size
    counted: int = 500  # clocks: to count four ids of a thread
    place: int = 1700  # clocks: to place a block, whatever its size; as many to read what all programs have counted
    placed: int = 2000  # clocks: to place four ids of a thread
    read: float = 1 / 8  # clocks: to read a count
    scattered: float = 0.7  # share of DRAM's rate that scattered stores reach


ROUTE, PERMUTE = Route(), Permute()
