"""Image encoders on the workers' side:
pixels become embeddings, which are kept until the scheduler forgets them.

May import: batch, checkpoints, config, models, multimodal, plugins.
Door: `Eye` and `load_eye` in eye.py, `EncodedImages` in encoded_images.py.
"""
