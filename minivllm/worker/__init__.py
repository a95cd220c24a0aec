"""One device: load a model, size its cache, warm up, run steps, sleep.

May import: attention, batch, checkpoints, compilation, compilation.packaged, config, device, distributed,
graphs, kv_cache, kv_transfer, kv_transfer.connectors, linear, linear.methods, lora, models, models.decoder,
multimodal.eyes, plugins, profiling, sampling, spec_decode, spec_decode.eagle, specs.
Door: `Worker` in worker.py, `ModelRunner` in model_runner.py.
"""
