"""The Python API: LLM, AsyncLLM, LLMEngine, beam search.

May import: config, data_parallel, engine_process.protocol, gguf, hub, processing, profiling, tokenizer.
Door: `LLM` in llm.py, `AsyncLLM` in async_llm.py.
"""
