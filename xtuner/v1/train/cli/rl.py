"""`python xtuner/v1/train/cli/rl.py --config CONFIG`: the same as `xtuner train CONFIG`, installed or not."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[4])  # the clone's root instead of this folder

    from xtuner.v1.train.cli.main import app

    app(["train", *sys.argv[1:]], prog_name="rl.py")
