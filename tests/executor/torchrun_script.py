"""A user's script, for ``torchrun --nproc-per-node 2 -m tests.executor.torchrun_script ARGUMENTS OUT``.

Every rank writes what it was answered into a file of its own, OUT with its rank behind.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from minivllm import LLM, SamplingParams
from minivllm.errors import RequestError
from tests.executor.test_pipeline_parallel import words
from tests.executor.test_tensor_parallel import answers

if __name__ == "__main__":
    rank = os.environ["RANK"]
    with LLM(**json.loads(sys.argv[1])) as llm:
        found = [answers(llm), words(llm), llm.collective_rpc("weight_checksums")]
        found.append(llm.get_metrics().num_preemptions > 0)
        try:
            llm.generate({"prompt_token_ids": [10**6]}, SamplingParams(max_tokens=1))
        except RequestError as error:
            found.append(str(error))
        llm.sleep(2)
        llm.wake_up()
        found.append(answers(llm))
        if "apart" in sys.argv:
            llm.generate({"prompt_token_ids": [5 + int(rank)]}, SamplingParams(max_tokens=2))
    Path(f"{sys.argv[2]}{rank}").write_text(json.dumps(found))
