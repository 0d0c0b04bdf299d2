"""Entry point of `python -m jreshard`."""

import sys

from jreshard.cli import main

sys.exit(main())
