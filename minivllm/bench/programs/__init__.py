"""Programs of the language against the same requests without it.

May import: bench.reports, cli.engine, config, frontend, lang, lang.examples, multimodal, multimodal.files,
processing, tokenizer.
"""
