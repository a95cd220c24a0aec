"""A prompt becomes a checked request, and tokens become outputs with text.

May import: config, multimodal, multimodal.files, sampling, stop_conditions, structured_output.schemas,
tokenizer.
Door: `InputProcessor` in input_processor.py, `OutputProcessor` in output_processor.py.
"""
