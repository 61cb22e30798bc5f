"""``python -m sconv``: the ``sconv`` command."""

import sys

from .cli import main

sys.exit(main())
