"""The weights of a training checkpoint as a Hugging Face checkpoint.

    tools/convert_megatron_to_hf.py CKPT_DIR OUT_DIR [--model HF_DIR]

The same as ``megasao convert megatron-to-hf``, whose --help explains everything.
"""

import sys

from megasao.cli import main

if __name__ == "__main__":
    main(["convert", "megatron-to-hf", *sys.argv[1:]])
