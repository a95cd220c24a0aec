"""One device: load a model, size its cache, warm up, run steps, sleep.

May import: attention, batch, checkpoints, compilation, config, device, graphs, kv_cache, linear, lora,
models, models.decoder, models.eagle, profiling, sampling, spec_decode.
Door: `Worker` in worker.py, `ModelRunner` in model_runner.py.
"""
