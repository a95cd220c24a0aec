"""Training of the eye in ``tutorials/eye``: canvases with digits, an encoder of 1.7 million weights, marks.

    pip install 'minivllm[eye]'
    python -m tutorials.eye_training words OUT       # phase 1: the eye learns words
    python -m tutorials.eye_training language OUT    # phase 2: it learns to be read by SmolLM2
    python -m tutorials.eye_training marks OUT       # what it knows about canvases that it has not seen

``scenes`` says what is on a canvas and in which words; ``canvases`` paints it; ``model`` makes the encoder;
``language`` reads it with SmolLM2; ``training`` is both phases; ``marks`` measures.
"""
