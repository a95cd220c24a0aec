"""Text to tokens and back: tokenizers of both formats, chat templates, incremental detokenization.

May import: gguf, gguf.vocabulary, hub, stop_conditions.
Door: `Tokenizer` in tokenizer.py.
"""
