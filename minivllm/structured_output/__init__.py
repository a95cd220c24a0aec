"""Output that keeps to a JSON schema, a regular expression, a list of choices or a grammar.

May import: config, structured_output.schemas, tokenizer.
Door: `StructuredOutputManager` in manager.py.
"""
