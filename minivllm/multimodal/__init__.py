"""Images of prompts: from bytes to placeholders and pixels, and which of them the encoder sees when.

May import: config, multimodal.files, multimodal.spans, tokenizer.
Door: `PromptImages` in prompt_images.py, `Encodings` in encodings.py, `find_images` in facts.py.
"""
