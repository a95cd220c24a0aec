"""Model cards, ``/tokenize`` and ``/detokenize``."""

from minivllm.multimodal.files.decoding import FORMATS, MAX_FILE_BYTES, MAX_PIXELS, MAX_RATIO, MAX_SIDE
from minivllm.server.answers.chat_messages import template_messages, template_options
from minivllm.server.bodies.errors import ApiError, invalid
from minivllm.server.protocol import operation as protocol
from minivllm.server.service.models import ServedModel
from minivllm.server.service.service import Service
from minivllm.server.service.settings import with_images

SHOWN_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def model_card(service: Service, model: ServedModel) -> protocol.ModelCard:
    defaults = service.engine.get_default_sampling_params()
    return protocol.ModelCard(
        id=model.name,
        object="model",
        created=service.started_at,
        owned_by="minivllm",
        root=service.engine.config.model if model.lora is None else model.lora.path,
        parent=None if model.lora is None else service.models.base_name,
        max_model_len=service.max_model_len,
        default_sampling_params={name: getattr(defaults, name) for name in SHOWN_DEFAULTS},
        input_modalities=["text", "image"] if service.sees else ["text"],
        image_limits=_image_limits(service),
    )


def _image_limits(service: Service) -> protocol.ImageLimits | None:
    images = service.engine.images
    if images is None:
        return None
    return protocol.ImageLimits(
        max_images=images.config.most_in_prompt,
        max_file_bytes=MAX_FILE_BYTES,
        max_pixels=MAX_PIXELS,
        max_side=MAX_SIDE,
        max_ratio=MAX_RATIO,
        max_body_bytes=with_images(service.settings.max_body_bytes),
        media_types=[f"image/{name.lower()}" for name in FORMATS],
    )


ASSUMED_CHARACTERS_PER_TOKEN = 64
"""Where the tokenizer has no bound of its own."""


def tokenize(service: Service, request: protocol.TokenizeRequest) -> protocol.TokenizeResponse:
    """Raises RequestError or ApiError 400."""
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "Give either prompt or messages.", param="prompt", code="invalid_value")
    tokenizer = service.engine.tokenizer
    if request.prompt is not None:
        limit = service.max_model_len * (tokenizer.max_characters_per_token or ASSUMED_CHARACTERS_PER_TOKEN)
        if len(request.prompt) > limit:
            message = (
                f"prompt has {len(request.prompt)} characters, but may have at most {limit}: no prompt holds "
                "more."
            )
            raise ApiError(400, message, param="prompt", code="context_length_exceeded")
        token_ids = tokenizer.encode(
            request.prompt, request.add_special_tokens is not False, request.parse_special_tokens is not False
        )
    else:
        messages = template_messages(request.messages or [], service.chat_template, sees=service.sees)
        options = template_options(
            request,
            request.tools or [],
            service.chat_template,
            trusts_templates=service.settings.trust_request_chat_template,
        )
        rendered = service.engine.render_chat(messages, **options, measures_images=True)
        token_ids = service.engine.expanded(rendered)
    return protocol.TokenizeResponse(
        count=len(token_ids),
        max_model_len=service.max_model_len,
        tokens=token_ids,
        token_strs=tokenizer.convert_ids_to_tokens(token_ids) if request.return_token_strs else None,
    )


def detokenize(service: Service, request: protocol.DetokenizeRequest) -> protocol.DetokenizeResponse:
    """Raises RequestError or ApiError 400."""
    tokenizer = service.engine.tokenizer
    for index, token in enumerate(request.tokens):
        if token >= tokenizer.vocab_size:
            why = f"is {token}, but must be below {tokenizer.vocab_size}, the tokenizer's size."
            raise invalid(f"tokens.{index}", why)
    return protocol.DetokenizeResponse(prompt=tokenizer.decode(request.tokens, request.skip_special_tokens))
