"""Runs the five programs and prints their texts: ``python -m minivllm.lang.examples [MODEL]``."""

from __future__ import annotations

import sys

from minivllm import LLM
from minivllm.lang import run_offline
from minivllm.lang.examples.programs import INPUTS


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    with LLM(model, max_model_len=2048) as llm:
        for name, (program, argument) in INPUTS.items():
            before = llm.get_metrics().num_computed_tokens
            [outcome] = run_offline(llm, program.using(temperature=0.0), [argument])
            if outcome.error is not None:
                raise outcome.error
            computed = llm.get_metrics().num_computed_tokens - before
            print(f"== {name} ({computed} tokens computed): {outcome.value!r}\n{outcome.text}\n")


if __name__ == "__main__":
    main()
