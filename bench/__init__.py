"""Benchmarks: suites of the ops, timed beside their peers on this machine's GPU. Not installed; run from a checkout.

Where a line belongs::

    workloads/      suites, operands, truth and peers of each op, a module per family
    suites.py       what a suite is made of
    baselines.py    what a workload is made of, and peers that many share
    stream.py       kernels that only load and store: the practical limit of memory
    run.py          how a case is timed and judged
    rows.py         what is recorded: ``results/<gpu>/<op>_<suite>.jsonl``
    plots.py        pictures of recorded rows, and the overview
    published.py    numbers that others published on their GPUs (``published.json``), beside rows recorded here
    models.py       whole models: our decoder beside transformers
    wall.py         options, rows as they come and tables that the commands share
    judge.py        sweeps: times of many configs of a problem, and how well the models rank them
    regret.py       how far what calls run is behind the best config of each sweep
    __main__.py     ``python -m bench gemm --suite square``
"""
