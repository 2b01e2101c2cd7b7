"""``python scripts/reproduce NAME --out DIR``: see ``command.py``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # of a folder that is run, Python puts the folder itself there
    from foldspec.cli_shared import INTERRUPTED, ctrl_c_waits

    try:
        with ctrl_c_waits():
            from reproduce.command import main
    except KeyboardInterrupt:
        print("reproduce: stopped", file=sys.stderr)
        sys.exit(INTERRUPTED)
    sys.exit(main())
