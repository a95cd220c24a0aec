"""One device: load a model, size its cache, warm up, run steps, sleep.

May import: attention, batch, checkpoints, compilation, config, device, distributed, graphs, kv_cache, kv_transfer,
kv_transfer.connectors, linear, linear.methods, lora, model_facts, models, models.decoder, models.eagle,
models.transformers_model, models.transformers_weights, multimodal.eyes, profiling, program, sampling, spec_decode,
weight_formats.
Door: `Worker` in worker.py, `ModelRunner` in model_runner.py.
"""
