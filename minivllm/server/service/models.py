"""The names a server answers to:
those of its model, and those of adapters, which may come and go while it serves."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minivllm.errors import ConfigError, RequestError
from minivllm.frontend.async_llm import AsyncLLM
from minivllm.messages import LoRARequest
from minivllm.server.bodies.errors import ApiError, invalid

MAX_ADAPTERS = 1024
MAX_SHOWN_NAMES = 20


@dataclass(frozen=True)
class ServedModel:
    """The model of a name. lora: the adapter to answer with, None for the model without one."""

    name: str
    lora: LoRARequest | None = None


class ServedModels:
    """Names and what they stand for. Lives on the server's event loop.

    base_names: names of the model itself; the first one is the default. adapters: loaded by
    ``load_configured``. directory: where adapters lie that clients may load, None if they may load none.
    Raises ConfigError for a name that is given twice.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        base_names: Sequence[str],
        adapters: Sequence[LoRARequest] = (),
        directory: Path | None = None,
    ) -> None:
        self._engine = engine
        self._directory = None if directory is None else directory.resolve()
        self._models = {name: ServedModel(name) for name in base_names}
        self._configured = adapters
        self._changing = asyncio.Lock()
        names = [*self._models, *(adapter.name for adapter in adapters)]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"The name {name!r} stands for two models: give each adapter a name of its own."
                )

    @property
    def base_name(self) -> str:
        """The first name of the model itself."""
        return next(iter(self._models))

    @property
    def all(self) -> list[ServedModel]:
        """The model's own names first, then adapters in the order in which they were loaded."""
        return list(self._models.values())

    def find(self, asked: str | None) -> ServedModel:
        """The model for a request's ``model``; left out, the model itself. Raises ApiError 404."""
        if asked is None:
            return self._models[self.base_name]
        if asked not in self._models:
            raise self._unknown("model", asked)
        return self._models[asked]

    async def load_configured(self) -> None:
        """Load the operator's adapters, before the first request.
        Raises RequestError for one that cannot be served."""
        for adapter in self._configured:
            await self._engine.add_lora(adapter)
            self._models[adapter.name] = ServedModel(adapter.name, adapter)

    async def load(self, name: str, path: str) -> ServedModel:
        """Load an adapter that a client names; once more under the same name and path is fine.

        path: inside the directory for adapters, relative to it or absolute. Raises ApiError 403 where the
        operator allows none, 400 for a path or an adapter that cannot be served, 409 for a name that is
        taken.
        """
        adapter = LoRARequest(name, lora_path=self._allowed_path(path))
        async with self._changing:
            known = self._models.get(name)
            if known is not None:
                if known.lora == adapter:
                    return known
                raise self._conflict(
                    "lora_name", f"The name {name!r} is taken: unload that adapter, or choose another."
                )
            if len(self._models) >= MAX_ADAPTERS:
                message = (
                    f"There are {len(self._models)} models, the most this server has: unload an adapter "
                    "first."
                )
                raise self._conflict("lora_name", message)
            try:
                # A request that was on its way when its adapter was unloaded has made the engine load it
                # again.
                await self._engine.remove_lora(name)
                await self._engine.add_lora(adapter)
            except RequestError as error:
                raise ApiError(400, str(error), param="lora_path", code="invalid_adapter") from None
            self._models[name] = ServedModel(name, adapter)
            return self._models[name]

    async def unload(self, name: str) -> None:
        """Forget an adapter. Raises ApiError 403 as ``load``, 404 for an unknown one,
        409 while requests use it."""
        self._require_permission()
        async with self._changing:
            model = self._models.get(name)
            if model is None or model.lora is None:
                raise self._unknown("adapter", name)
            # From here on no new request gets in.
            del self._models[name]
            try:
                await self._engine.remove_lora(name)
            except BaseException as error:
                self._models[name] = model
                if isinstance(error, RequestError):
                    raise self._conflict("lora_name", str(error)) from None
                raise

    def _require_permission(self) -> Path:
        if self._directory is None:
            raise ApiError(
                403,
                "Clients may not load or unload adapters here: the operator allows it with --lora-directory.",
                type="permission_error",
                code="adapters_are_fixed",
            )
        return self._directory

    def _allowed_path(self, path: str) -> str:
        """The absolute path, links followed.
        A path outside the directory is refused, whether it exists or not."""
        directory = self._require_permission()
        try:
            resolved = (directory / path).resolve()
        except (OSError, RuntimeError, ValueError):  # a loop of links, a name that is none
            resolved = directory
        if resolved == directory or not resolved.is_relative_to(directory):
            why = "must name a directory inside the server's directory for adapters (--lora-directory)."
            raise invalid("lora_path", why)
        return str(resolved)

    def _unknown(self, what: str, asked: str) -> ApiError:
        names = [model.name for model in self._models.values() if what == "model" or model.lora is not None]
        known = ", ".join(names[:MAX_SHOWN_NAMES]) or "none"
        if len(names) > MAX_SHOWN_NAMES:
            known += f" and {len(names) - MAX_SHOWN_NAMES} more"
        return ApiError(
            404,
            f"The {what} {asked[:200]!r} is not served here; known are: {known}.",
            param="model" if what == "model" else "lora_name",
            code="model_not_found",
        )

    def _conflict(self, param: str, message: str) -> ApiError:
        return ApiError(409, message, param=param, code="conflict")
