"""`python -m sparring` is the `sparring` command."""

import sys

from sparring.services.main import main

sys.exit(main())
