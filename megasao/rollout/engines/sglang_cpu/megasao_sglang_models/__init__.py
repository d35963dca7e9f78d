"""A package for SGLANG_EXTERNAL_MODEL_PACKAGE: only the served model's class is imported at start.

SGLang imports every model that it knows, which is most of the start-up on a CPU. A class found here is used at once; if
none is found, SGLang falls back to its own search.
"""
