"""The launch of a body's kernel."""

from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass.cute as cute


class Launched:
    """The common part of bodies that are launched alike. Each has a ``kernel``."""

    kernel: Any
    threads: int
    ctas_per_sm: int  # bounds registers so that so many CTAs fit
    dependent: bool  # launched under programmatic dependent launch
    cluster_shape: ClassVar[list[int] | None] = None

    @cute.jit
    def launch(self, arguments: tuple, grid: list, stream: cuda.CUstream):
        """Launches the kernel on a ``grid`` of CTAs."""
        self.kernel(*arguments).launch(
            grid=grid,
            block=[self.threads, 1, 1],
            cluster=self.cluster_shape,
            min_blocks_per_mp=self.ctas_per_sm,
            # Percent. A saved kernel does not carry it, but without it the DSL asks the driver, which may be absent.
            preferred_smem_carveout=100,
            use_pdl=self.dependent,
            stream=stream,
        )
