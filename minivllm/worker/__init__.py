"""One device: load a model, size its cache, warm up, run steps, sleep.

May import: attention, batch, compilation, compilation.packaged, config, device, distributed, graphs,
kv_cache, kv_transfer, kv_transfer.connectors, linear.methods, lora, models, models.decoder, multimodal.eyes,
profiling, sampling, spec_decode, specs, worker.loading, worker.sampled.
Door: `Worker` in worker.py, `ModelRunner` in model_runner.py.
"""
