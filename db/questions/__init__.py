"""Questions about tuned configs, with stored texts read as the ops declare them. Loads no torch.

Where a line belongs::

    query.py      what queries ask, and what stored texts mean
    reader.py     winners as people ask for them: typed, local and shipped side by side
    cli.py        ``cutekernels db``
    listing.py    its tables, within 80 columns
    html_report.py  ``cutekernels db report``
"""
