"""Finds the packages. ``autotune/`` and ``db/`` lie at the top, and are installed as parts of ``cutekernels``.

A top-level module called ``db`` would be shadowed by any user's own ``db.py``.
"""

import shutil
from pathlib import Path

from setuptools import find_namespace_packages, setup

shutil.rmtree(Path(__file__).parent / "build/lib", ignore_errors=True)  # or a wheel has what was deleted since the last
ROOMS = ("autotune", "db")
names = ("cutekernels", *ROOMS)
found = find_namespace_packages(include=[*names, *(f"{name}.*" for name in names)])  # folders of data alone too

setup(
    packages=[name if name.startswith("cutekernels") else f"cutekernels.{name}" for name in found],
    package_dir={f"cutekernels.{room}": room for room in ROOMS},
)
