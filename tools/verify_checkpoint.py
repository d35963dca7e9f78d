"""Compare two checkpoints: keys, shapes, dtypes, values.

    tools/verify_checkpoint.py A B

The same as ``megasao convert verify``, whose --help explains everything.
"""

import sys

from megasao.cli import main

if __name__ == "__main__":
    main(["convert", "verify", *sys.argv[1:]])
