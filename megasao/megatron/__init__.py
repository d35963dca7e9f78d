"""Everything that touches Megatron-Core. Importing this package, where no CUDA is present, installs the CPU shim.

The shim must come before the first import of ``megatron.core``, which every module here makes; so it is here.
"""

import torch

from megasao.megatron import cpu

if not torch.cuda.is_available():
    cpu.install()
