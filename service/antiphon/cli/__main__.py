"""Run the `antiphon` command as `python -m antiphon.cli`."""

import sys

from antiphon.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
