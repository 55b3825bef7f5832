"""`python -m sparsek` is the command line."""

from sparsek.tools.cli.__main__ import main

if __name__ == "__main__":
    main()
