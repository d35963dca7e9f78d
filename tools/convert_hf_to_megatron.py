"""A Hugging Face checkpoint as a training checkpoint.

    tools/convert_hf_to_megatron.py HF_DIR OUT_DIR [--parallel N]

The same as ``megasao convert hf-to-megatron``, whose --help explains everything.
"""

import sys

from megasao.cli import main

if __name__ == "__main__":
    main(["convert", "hf-to-megatron", *sys.argv[1:]])
