"""From text to tokens and back: tokenizers of both formats, chat templates, incremental detokenizing.

May import: gguf, gguf.vocabulary, hub, stop_conditions.
Door: `Tokenizer` in tokenizer.py.
"""
