"""Programmatic dependent launch (PDL): a kernel is set up while the one ahead of it still runs."""

import cutlass.cute as cute


def pdl_wait() -> None:
    """All threads wait until the kernel ahead has ended and its writes are visible (griddepcontrol.wait).

    Before it stand set-up and prefetches into the L2 cache alone, which are right whatever is written meanwhile.
    """
    cute.arch.griddepcontrol_wait()


def pdl_launch() -> None:
    """The next kernel's CTAs may be placed: their set-up, then their loads, follow what this one has under way
    (griddepcontrol.launch_dependents).
    """
    cute.arch.griddepcontrol_launch_dependents()
