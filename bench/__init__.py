"""Benchmarks: the ops' suites beside their peers, on the GPU at hand. Not installed; run from a checkout.

``suites.py`` says what is timed, ``baselines.py`` against whom, ``run.py`` how, ``rows.py`` what is recorded,
``plots.py`` draws it. ``python -m bench gemm --suite square`` writes ``results/<gpu>/gemm_square.jsonl`` and a PNG.
``stream.py`` is what memory can do. ``published.json`` holds what others published, measured by them on their GPUs;
``published.py`` and ``python -m bench rope --published`` set the rows measured here beside it.
"""
