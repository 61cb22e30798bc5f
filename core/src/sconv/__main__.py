"""``python -m sconv``: the ``sconv`` command."""

import sys

from .cli.main import main

sys.exit(main())
