"""`python -m burst_portable` is the command `burst-portable`: torchrun starts it by this name."""

import sys

from burst_portable.cli import main

sys.exit(main())
