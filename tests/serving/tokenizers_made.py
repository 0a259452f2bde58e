"""Small real tokenizers, trained here: one of each kind of decoder."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and then the dog sleeps under a tree near the river",
    "a request waits in the queue until there is room; then it runs, one token after another, to its end",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))  # three\n\tindented\r\n",
    "Grüße aus Köln: über Flüsse, Straßen und Plätze. Ça va très bien, merci beaucoup! ¿Qué tal?",
    "你好、世界。今天天气很好、我们去公园散步吧。 こんにちは世界、お元気ですか。",
    "numbers 0 1 2 3 45 678 9.01 and symbols <tag> {json: [1, 2]} ~ ^ | \\ / @ # $ % & *",
]


@functools.cache
def byte_level(vocab_size: int = 400) -> Tokenizer:
    """Byte-level BPE with two special tokens and one plain added token that is outside the byte alphabet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False), AddedToken("<é>", special=False)])
    return tokenizer


def _with_byte_tokens() -> Tokenizer:
    """BPE over words that begin with U+2581, with one token for each byte; no decoder yet."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.train_from_iterator(CORPUS, trainer)
    state = tokenizer.to_str()
    # Trained as special so that they are in the vocabulary; in a real tokenizer byte tokens are plain entries of it.
    fields = json.loads(state)
    fields["added_tokens"] = [entry for entry in fields["added_tokens"] if not entry["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(fields))
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    return tokenizer


@functools.cache
def llama2_like() -> Tokenizer:
    """As converted Llama 2 tokenizers are: a normalizer writes the U+2581, the decoder drops one leading space."""
    tokenizer = _with_byte_tokens()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = None
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@functools.cache
def metaspace() -> Tokenizer:
    """Byte fallback, then a Metaspace decoder."""
    tokenizer = _with_byte_tokens()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    return tokenizer


@functools.cache
def gemma_like() -> Tokenizer:
    """Byte fallback, and no space is dropped."""
    tokenizer = _with_byte_tokens()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@functools.cache
def word_suffix() -> Tokenizer:
    """A decoder whose text depends on the neighbour: a word's end becomes a space only if a token follows."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


ALL: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "llama2_like": llama2_like,
    "metaspace": metaspace,
    "gemma_like": gemma_like,
    "word_suffix": word_suffix,
}
