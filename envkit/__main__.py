"""``python -m envkit``: the same as the command ``envkit``."""

from envkit.cli.app import main

if __name__ == "__main__":
    main()
