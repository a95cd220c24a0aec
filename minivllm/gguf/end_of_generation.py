"""The tokens of a GGUF vocabulary that end an answer;
llama.cpp finds most of them by their text, and so does this."""

from typing import Any

CONTROL = 3
"""The token type of ``tokenizer.ggml.token_type`` for tokens that are no text."""

_ENDING_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<end_of_turn>",
        "<turn|>",
        "<|tool_response>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<｜end▁of▁sentence｜>",
        "</s>",
        "<eos>",
        "[EOS]",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[e~[",
    }
)
# Entries that name a token, and the texts by which a file without the entry has it.
_NAMED = {
    "eos": (),
    "eot": (),
    "eom": (),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# In these formats a token of _ENDING_TEXTS has another meaning: other ends of the vocabulary -> the token.
_EXCEPTIONS = (
    ({"<|return|>", "<|call|>"}, "<|end|>"),  # gpt-oss: the end of one channel, after which the next begins
    ({"<|call|>", "<|flush|>"}, "<|end|>"),
    ({"<|calls|>", "<|return|>"}, "<|end|>"),
    ({"<|calls|>", "<|flush|>"}, "<|end|>"),
    ({"<|tool_response>"}, "</s>"),
    ({"<|plamo:eos|>"}, "</s>"),
)


def end_of_generation(metadata: dict[str, Any]) -> list[int]:
    """Ids of the tokens that end an answer, the file's end-of-text token first."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    tokens = tokens if isinstance(tokens, list) else []
    ids = {token: index for index, token in enumerate(tokens)}
    found: dict[int, None] = {}
    for name, texts in _NAMED.items():
        named = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if named is None:
            named = next((ids[text] for text in texts if text in ids), None)
        if named is not None:
            found[named] = None
    found.update(dict.fromkeys(index for index, token in enumerate(tokens) if token in _ENDING_TEXTS))
    for others, excepted in _EXCEPTIONS:
        if ids.get(excepted) in found and all(ids.get(other) in found for other in others):
            del found[ids[excepted]]
    return list(found)
