"""Training of the eye in ``tutorials/eye``: canvases with digits, an encoder of 1.7 million weights, marks.

    pip install 'minivllm[eye]'
    python -m tutorials.eye_training attributes OUT   # phase 1: what is on a canvas; the encoder alone
    python -m tutorials.eye_training words OUT        # phase 2: says it in SmolLM2's embeddings of words
    python -m tutorials.eye_training language OUT     # phase 3: is read by SmolLM2, which is frozen
    python -m tutorials.eye_training polish OUT       # phase 4: words once more; the encoder is kept
    python -m tutorials.eye_training marks OUT        # canvases that it has not seen

``scenes`` says what is on a canvas and in which words; ``canvases`` paints it; ``model`` makes the encoder;
``language`` reads it with SmolLM2; ``training`` is the four phases; ``marks`` measures.
"""
