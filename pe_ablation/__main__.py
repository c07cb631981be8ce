"""`python -m pe_ablation` is `pe-ablation`."""

import sys

from pe_ablation.cli import main

if __name__ == "__main__":
    sys.exit(main())
