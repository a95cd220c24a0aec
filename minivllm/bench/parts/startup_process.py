"""A fresh process that starts an engine, generates one token, and says how long each part of that took.

    python -m minivllm.bench.parts.startup_process '{"model": "smollm2"}' 1700000000.0

The second argument is time.time() before the process was made. Prints one JSON object {part: seconds}.
"""

import time

BORN = time.time()
"""The interpreter is up, and nothing of this package is imported."""


def main() -> None:
    """Measure this process's own start."""
    import json
    import sys

    arguments, made = json.loads(sys.argv[1]), float(sys.argv[2])
    started = time.perf_counter()
    from minivllm.bench.parts.parts import timed_spans
    from minivllm.config import EngineArgs
    from minivllm.frontend.llm_engine import LLMEngine
    from minivllm.sampling_params import SamplingParams

    imported = time.perf_counter()
    parts = {"python": BORN - made, "import": imported - started}
    with timed_spans("load", "compile", "capture") as seconds:
        engine = LLMEngine.from_args(EngineArgs.from_kwargs(**arguments))
    ready = time.perf_counter()
    parts |= {name: sum(calls) for name, calls in seconds.items()}
    parts["other"] = ready - imported - sum(parts[name] for name in seconds)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    engine.add_request(None, {"prompt_token_ids": [5, 6, 7, 8]}, params)
    while engine.has_unfinished_requests():
        engine.step()
    done = time.perf_counter()
    parts["first token"] = done - ready
    parts["start to first token"] = parts["python"] + done - started
    print(json.dumps(parts), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
