"""Spans of families that have no entry here, as the processor of transformers writes them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from minivllm.errors import ModelError
from minivllm.multimodal.spans.span import Encode, Options, Plain, Span, image_token

_SIDES = tuple(round(2 ** (number / 3)) for number in range(43))
"""Sides of images, 1 to 16,384 pixels, of which all pairs are tried to find the image of the most tiles."""
_OF_MASKS_AND_PLACES = ("mm_token_type_ids", "token_type_ids")
_OF_LAYERS = ("visual", "vision", "image", "deepstack", "cross")


class ByProcessor(Plain):
    """Images that are cut into tiles of one size, or are one: as many as the image processor's
    ``get_number_of_image_patches`` says, which transformers resizes, and whose span the processor's
    ``replace_image_token`` writes."""

    def __init__(self, config: Mapping[str, Any], directory: str) -> None:
        """config: the entries of config.json. Raises ModelError where the family does something else with
        images."""
        self._family = str(config["model_type"])
        self._directory = directory
        self._check_model()
        chosen = self._processor._merge_kwargs()["images_kwargs"]
        self.resizing: Mapping[str, Any] = {
            name: value for name, value in chosen.items() if name != "return_tensors"
        }
        self._embed_token = image_token({"image_token_id": self._config.image_token_id})
        self.unit_shape = self.least_unit_shape = self._shape_of_tiles()
        self._known: dict[int, Span] = {}
        self.unit_embeds = 0
        whole = self._span(1, self._read)
        self.unit_embeds = sum(count for _, count in whole.runs)
        self.most_embeds = self.unit_embeds * self._most_tiles()
        written = getattr(self._processor, "image_placeholder_token", self._processor.image_token)
        self.placeholder = self._token(written)

    def _refuse(self, why: str) -> ModelError:
        return ModelError(f"Images of models of type {self._family!r} are not served: {why}.")

    @cached_property
    def _config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self._directory)

    def _check_model(self) -> None:
        """Raises ModelError where features take more than the places of embeddings."""
        from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_MAPPING

        model: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(self._config)]
        encode = getattr(MODEL_MAPPING.get(type(self._config), None), "get_image_features", None)
        if encode is None:
            raise self._refuse(f"the body of {model.__name__} has no get_image_features")
        given = inspect.signature(model.forward).parameters
        if any(name in given for name in _OF_MASKS_AND_PLACES):
            raise self._refuse("their tokens see what comes later, or are rotated by row and column")
        if "inputs_embeds" not in given or "pixel_values" not in given:
            raise self._refuse(f"{model.__name__} takes no inputs_embeds in the place of images")
        self._read_of_images = inspect.signature(encode).parameters
        for name, parameter in list(self._read_of_images.items())[2:]:
            if parameter.default is parameter.empty and parameter.kind != parameter.VAR_KEYWORD:
                raise self._refuse(f"get_image_features needs {name} besides pixels")
        language: Any = MODEL_MAPPING.get(type(self._config.get_text_config()), None)
        if language is None:
            raise self._refuse("their language model is of a kind of its own")
        for name in inspect.signature(language.forward).parameters:
            if any(part in name for part in _OF_LAYERS):
                raise self._refuse(f"layers of the language model read {name}")

    @cached_property
    def _processor(self) -> Any:
        """Without the parts for videos and sounds."""
        from transformers import PROCESSOR_MAPPING, AutoImageProcessor, AutoTokenizer, ProcessorMixin

        if type(self._config) not in PROCESSOR_MAPPING:
            raise self._refuse("transformers has no processor for them")
        parts = {}
        try:
            given: Any = PROCESSOR_MAPPING[type(self._config)]
            parts["image_processor"] = AutoImageProcessor.from_pretrained(self._directory, backend="pil")
            parts["tokenizer"] = AutoTokenizer.from_pretrained(self._directory)
            kind: Any = type(
                given.__name__, (given,), {"check_argument_for_proper_class": lambda *ignored: None}
            )
            settings, _ = kind.get_processor_dict(self._directory)
            processor = kind.from_args_and_dict([parts.get(name) for name in kind.get_attributes()], settings)
        except Exception as error:  # of files, of packages that are not there, of a processor's own
            said = " ".join(str(error).split())
            raise self._refuse(f"their processor cannot be made here ({said})") from error
        writes = given.replace_image_token is not ProcessorMixin.replace_image_token
        if not writes or getattr(processor, "image_token", None) is None:
            raise self._refuse(f"{given.__name__} does not say what stands for one of them")
        return processor

    def _shape_of_tiles(self) -> tuple[int, int, int]:
        """Of images that are processed as they will be: as many tiles as said, all of one size."""
        import numpy as np
        from PIL import Image

        shapes = set()
        unscaled = {**self.resizing, "do_rescale": False, "do_normalize": False}
        for size in ((64, 48), (300, 40), (40, 300), (700, 700)):
            try:
                found = self._processor.image_processor(Image.new("RGB", size), **unscaled)
                values = np.asarray(found["pixel_values"])
            except (KeyError, TypeError, ValueError) as error:
                raise self._refuse(f"their processor gives no pixels of one image ({error!r})") from error
            besides = sorted((set(found) & set(self._read_of_images)) - {"pixel_values"})
            if besides:
                raise self._refuse(f"get_image_features reads {besides[0]} besides pixels")
            if values.ndim < 4 or values.shape[-3] != 3:
                raise self._refuse("their processor gives something else than tiles of red, green and blue")
            shapes.add(values.shape[-3:])
            if values.reshape(-1, *values.shape[-3:]).shape[0] != self._num_tiles(*size):
                raise self._refuse(f"get_number_of_image_patches is wrong for {size[0]} × {size[1]} pixels")
        if len(shapes) > 1:
            raise self._refuse("they keep nearly their size")
        height, width = shapes.pop()[1:]
        return 3, int(height), int(width)

    def _num_tiles(self, width: int, height: int) -> int:
        count = getattr(self._processor.image_processor, "get_number_of_image_patches", None)
        return 1 if count is None else int(count(height, width, dict(self.resizing)))

    def _most_tiles(self) -> int:
        return max(self._num_tiles(width, height) for width in _SIDES for height in _SIDES)

    def _read(self, text: str) -> list[int]:
        token_ids: list[int] = self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_ids

    def _token(self, text: str) -> int:
        token_ids = self._read(text)
        if len(token_ids) != 1:
            raise self._refuse(f"the tokenizer has no token {text!r}, the placeholder")
        return token_ids[0]

    def expand(self, width: int, height: int, options: Options, encode: Encode) -> Span:
        """See Expansion."""
        num_tiles = self._num_tiles(width, height)
        if num_tiles not in self._known:
            self._known[num_tiles] = self._span(num_tiles, encode)
        return self._known[num_tiles]

    def _span(self, num_tiles: int, encode: Encode) -> Span:
        """Raises ModelError where it does not follow from the number of tiles."""
        import numpy as np

        pixels = np.broadcast_to(np.uint8(0), (num_tiles, *self.unit_shape))
        try:
            text = self._processor.replace_image_token(
                {"pixel_values": pixels, "num_patches": [num_tiles]}, 0
            )
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise self._refuse(
                f"their processor needs more than the number of their tiles ({error!r})"
            ) from error
        token_ids = encode(text)
        runs: list[tuple[int, int]] = []
        for place, token in enumerate(token_ids):
            if token != self._embed_token:
                continue
            if runs and sum(runs[-1]) == place:
                runs[-1] = runs[-1][0], runs[-1][1] + 1
            else:
                runs.append((place, 1))
        count = sum(count for _, count in runs)
        if count != num_tiles * (self.unit_embeds or count) or not count:
            raise self._refuse(
                f"the tokenizer makes {count} placeholders of {num_tiles} tiles with {self.unit_embeds} each"
            )
        return Span(token_ids, runs, num_tiles, self.unit_embeds or count, self.unit_shape)
