"""A Hugging Face checkpoint in blocks of FP8, or back in bfloat16.

    tools/quantize_hf.py HF_DIR OUT_DIR [--format fp8_block|fp8_tensor] [--dequantize]

The same as ``megasao convert quantize``, whose --help explains everything.
"""

import sys

from megasao.cli import main

if __name__ == "__main__":
    main(["convert", "quantize", *sys.argv[1:]])
