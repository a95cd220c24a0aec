"""Kernels that PyTorch runs on a device, together with the spans, as a Chrome trace."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from minivllm.errors import RequestError
from minivllm.profiling.spans import listen, torch_range


class DeviceProfile:
    """A recording, which begins at once. Raises RequestError if nothing can be written to the directory."""

    def __init__(self, directory: str, device: torch.device) -> None:
        self._directory = Path(directory)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(
                f"The profile cannot go to {directory!r} ({error.strerror}): name a directory."
            ) from None
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()
        self._listening = ExitStack()
        self._listening.enter_context(listen(torch_range))

    def stop(self) -> str:
        """Write what was recorded; the path of the file, which ui.perfetto.dev opens."""
        self._listening.close()
        self._profile.stop()
        path = self._directory / f"minivllm-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"
        self._profile.export_chrome_trace(str(path))
        return str(path)
