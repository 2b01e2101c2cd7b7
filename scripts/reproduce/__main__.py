"""``python scripts/reproduce NAME --out DIR``: see ``command.py``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # of a folder that is run, Python puts the folder itself there
    from reproduce.command import main

    sys.exit(main())
