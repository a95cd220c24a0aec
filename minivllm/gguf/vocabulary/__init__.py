"""The vocabulary of a GGUF file as a tokenizer:
how text is split, which pairs merge, which tokens are special.

May import: gguf.
Door: `build_vocabulary` in build.py.
"""
