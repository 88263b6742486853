"""``python -m cutekernels``: the command line where its script is not on the path."""

from cutekernels.cli import main

if __name__ == "__main__":
    main()
