"""Small tokenizers of every decoder family, built in memory."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from minivllm.tokenizer.tokenizer import Tokenizer as FrontendTokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog. STOP words and stop words, END of text.",
    "Größe, naïve café, señor, Ελλάδα, Привет мир, 日本語のテキスト, 한국어, ไทย, हिन्दी",
    "emoji 😀😃👩‍👩‍👧 flags 🇫🇷🇯🇵 math ∑∫√ and  spaces   here\n\nnew lines\ttabs",
]
SPECIAL = ["<|begin|>", "<|end|>"]


def byte_level_bpe(vocab_size: int = 400) -> Tokenizer:
    """GPT-2's kind: every byte is a token, some merges;
    added tokens both special and plain, one of them not ASCII."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("日本語", special=False)])
    return tokenizer


def byte_fallback_bpe(strip_first_space: bool = True) -> Tokenizer:
    """SentencePiece's kind (Llama 2, Mistral, Gemma):
    ``▁`` for spaces, ``<0x..>`` for bytes outside the vocabulary."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [*"abcdefghijklmnopqrstuvwxyz.,éß日�", "▁the", "▁a", "ing", "▁STOP", "ST", "OP", "▁▁"]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if strip_first_space else []))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


def metaspace_unigram() -> Tokenizer:
    """T5's kind: the first space of the text is dropped."""
    pieces = ["<unk>", "▁", *"abcdeé日", "▁the", "▁a", "ing", "▁▁"]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def word_pieces() -> Tokenizer:
    """BERT's kind: ``##`` continues a word, anything else begins one,
    and spaces before punctuation are cleaned up."""
    pieces = ["[UNK]", "the", "a", "##ing", "##s", "do", "not", ".", ",", "'", "n't", "日", "##é"]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def whole_words() -> Tokenizer:
    """No decoder at all: words joined by spaces."""
    pieces = ["[UNK]", "the", "fox", "日本", "é"]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def wrapped(backend: Tokenizer, chat_template: str | None = None) -> FrontendTokenizer:
    """As the frontend gets it from ``load_tokenizer``."""
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|end|>")
    fast.chat_template = chat_template
    return FrontendTokenizer(fast, "a small tokenizer")


FAMILIES = {
    "byte-level": byte_level_bpe,
    "byte-fallback": byte_fallback_bpe,
    "byte-fallback, spaces kept": lambda: byte_fallback_bpe(strip_first_space=False),
    "metaspace": metaspace_unigram,
    "word pieces": word_pieces,
    "whole words": whole_words,
}
