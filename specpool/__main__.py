"""`python -m specpool` is the command `specpool`."""

from specpool.cli import main

raise SystemExit(main())
