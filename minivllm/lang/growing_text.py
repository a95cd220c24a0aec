"""``GrowingText``: what was appended to a state, as token ids that never change, with its images."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from minivllm.errors import ContextLengthError, RequestError
from minivllm.lang.engines import Engine, Settings
from minivllm.lang.roles import Block, Conversation, Image
from minivllm.tokenizer.pieces import encode_after
from minivllm.tokenizer.valid_text import check_text

if TYPE_CHECKING:
    from minivllm.multimodal.files.decoding import Picture

_LONG_TEXT = 4096
"""Characters from which on tokenizing moves to a thread."""


class Written(NamedTuple):
    """An appended text, as it is tokenised.

    is_rendered: the chat template wrote it; special tokens in messages are hidden then. images: it has a
    placeholder for each.
    """

    text: str
    is_rendered: bool
    images: list[Image]


class GrowingText:
    """Every appended text, and every group of role blocks, is tokenised by itself when ``settle`` is called.

    tokens: all that is settled, with one placeholder for each image. pictures: the images, in order.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.tokens: list[int] = []
        self.pictures: list[Picture] = []
        self._num_in_spans = 0  # tokens of the pictures besides their placeholders
        self._texts: list[str] = []
        self._pending: list[str | Image | Block] = []
        self._engine = engine
        self._images = engine.frontend.images
        self._tokenizer = engine.frontend.tokenizer
        self._chat = Conversation(
            self._tokenizer,
            self._tokenizer.hidden_texts(),
            settings.chat_template,
            settings.chat_template_kwargs,
            None if self._images is None else self._images.mark,
        )

    def __len__(self) -> int:
        """Tokens of the prompt that the engine sees, with the spans of images."""
        return len(self.tokens) + self._num_in_spans

    def __str__(self) -> str:
        """All so far, what is not settled too, with the special tokens of the chat template."""
        pieces, chat = self._written(opens=False)
        return "".join([*self._texts, *(chat.hidden.restored(piece.text) for piece in pieces)])

    def branch(self, branch: GrowingText) -> None:
        """Let a new text be the same as this one, until one of them grows."""
        branch.tokens, branch.pictures = list(self.tokens), list(self.pictures)
        branch._num_in_spans = self._num_in_spans
        branch._texts, branch._pending = list(self._texts), list(self._pending)
        branch._chat = self._chat

    def append(self, piece: str | Image | Block) -> None:
        """Append a text, an image or a role block.
        Raises RequestError for anything else, where a block or an image cannot come, and for images that the
        model cannot see."""
        if not isinstance(piece, (str, Image, Block)):
            raise RequestError(
                f"An object of type {type(piece).__name__} was appended, but a state takes texts, image(…), "
                "and role blocks such as user(…)."
            )
        if isinstance(piece, str):
            check_text("The text", piece)
        has_images = bool(piece.images) if isinstance(piece, Block) else isinstance(piece, Image)
        if has_images and self._images is None:
            no_images = self._engine.frontend.config.no_images
            raise RequestError(f"An image was appended, but the model cannot see it. {no_images}")
        is_chat = self._chat.messages or any(isinstance(one, Block) for one in self._pending)
        if isinstance(piece, Block) and (self._texts or self._pending) and not is_chat:
            raise RequestError(
                f"A {piece.role} block was appended after plain text: begin with a role block, or write the "
                "turns as text."
            )
        if isinstance(piece, Image) and is_chat:
            raise RequestError("An image was appended to a conversation: write user(image(…)).")
        if piece:
            self._pending.append(piece)

    def append_tokens(self, token_ids: list[int], text: str) -> None:
        """Append what was sampled or chosen, as it is. text: of these tokens, and of those that follow."""
        self.tokens += token_ids
        self._texts.append(text)
        if self._chat.messages:
            self._chat = self._chat.said(text)

    async def settle(self, *, opens: bool) -> None:
        """Tokenise what was appended; all of it, or nothing if something is refused.
        opens: the assistant's turn follows. Raises RequestError."""
        pieces, chat = self._written(opens=opens)
        tokens, texts, pictures = list(self.tokens), list(self._texts), list(self.pictures)
        num_in_spans, images = self._num_in_spans, self._images
        for piece in pieces:
            added = await self._tokenised(piece, chat, is_first=not tokens)
            if images is not None:
                new: list[Picture] = []
                if piece.images:
                    sources = [*pictures, *(image.source for image in piece.images)]
                    new = (await self._engine.read_images(images, sources))[len(pictures) :]
                num_in_spans += len(images.expand(added, new)[0]) - len(added)
                pictures += new
            tokens += added
            texts.append(chat.hidden.restored(piece.text))
        if not tokens:
            raise RequestError("Nothing was appended yet: begin with a text or a role block.")
        self.tokens = tokens
        self.pictures = pictures
        self._num_in_spans = num_in_spans
        self._texts = texts
        self._chat = chat
        self._pending = []

    def encode_after(self, text: str) -> list[int]:
        """Token ids of a plain text that follows."""
        return encode_after(self._tokenizer, text, partial(self._tokenizer.encode, add_special_tokens=False))

    def _written(self, *, opens: bool) -> tuple[list[Written], Conversation]:
        """What was appended, and the conversation after it.
        opens: it ends with the begin of the assistant's turn."""
        chat, blocks = self._chat, list[Block]()
        pieces: list[Written] = []

        def render(opens: bool) -> None:
            nonlocal chat, blocks
            chat, added = chat.extended(blocks, opens=opens)
            pieces.append(self._with_images(added, True, [one for block in blocks for one in block.images]))
            blocks = []

        for piece in self._pending:
            if isinstance(piece, Block):
                blocks.append(piece)
            elif isinstance(piece, Image):
                placeholder = "" if self._images is None else self._images.placeholder_text
                pieces.append(self._with_images(placeholder, False, [piece]))
            else:
                if chat.messages or blocks:
                    render(True)
                    chat = chat.said(piece)
                pieces.append(Written(piece, False, []))
        if chat.messages or blocks:
            render(opens)
        return [piece for piece in pieces if piece.text], chat

    def _with_images(self, text: str, is_rendered: bool, images: list[Image]) -> Written:
        """images: for which the text has placeholders."""
        text = self._images.written(text, None) if self._images is not None and images else text
        return Written(text, is_rendered, images)

    async def _tokenised(self, piece: Written, chat: Conversation, *, is_first: bool) -> list[int]:
        """Raises RequestError for a text that is too long for the context, without tokenising it."""
        tokenizer, text = self._tokenizer, piece.text
        longest = tokenizer.max_characters_per_token
        limit = self._engine.frontend.config.scheduler.max_model_len
        if longest is not None and len(text) > longest * limit:
            raise ContextLengthError(
                f"A text of {len(text)} characters was appended, but max_model_len is {limit}: so many "
                f"tokens are never more than {longest * limit} characters. Shorten it."
            )
        if piece.is_rendered:
            encode = partial(tokenizer.encode_rendered, hidden=chat.hidden)
            work = partial(encode, text) if is_first else partial(encode_after, tokenizer, text, encode)
        else:
            work = partial(tokenizer.encode if is_first else self.encode_after, text)
        return await asyncio.to_thread(work) if len(text) > _LONG_TEXT else work()
