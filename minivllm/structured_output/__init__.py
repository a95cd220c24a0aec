"""Structured output: JSON schemas, regular expressions, choices and grammars.

May import: config, structured_output.schemas, tokenizer.
Door: `StructuredOutputManager` in manager.py.
"""
