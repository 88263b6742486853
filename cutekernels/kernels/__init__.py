"""Kernel bodies, one room per language: ``cute/`` (CuTe Python DSL) and ``triton/``.

Bodies know tensors, tiles and schedules; they do not know GPUs by name, problems, configs or the
dispatcher. Only an op's ``build`` imports them.
"""
