"""The served tokenizer for grammars, read while the engine starts: building it would hold up the streams later."""

from __future__ import annotations

from concurrent.futures import Future
from threading import Thread

from gplan.errors import GplanError
from gplan.serving.grammar.library import GrammarError, GrammarVocabulary


class GrammarsAtStart:
    """Reads the tokenizer in a thread, beside the weights.

    Args:
        vocab_size: width of the model's logits.
    """

    def __init__(self, checkpoint: str, vocab_size: int) -> None:
        self._found: Future[tuple[GrammarVocabulary | None, str]] = Future()
        Thread(target=self._run, args=(checkpoint, vocab_size), name="grammars", daemon=True).start()

    def result(self) -> tuple[GrammarVocabulary | None, str]:
        """The vocabulary, or None and why no grammar can be served."""
        return self._found.result()

    def _run(self, checkpoint: str, vocab_size: int) -> None:
        try:
            self._found.set_result((_read(checkpoint, vocab_size), ""))
        except GrammarError as error:
            self._found.set_result((None, f"{error.message}. {error.hint}"))
        except BaseException as error:
            # Also what the library's own panics become.
            self._found.set_result((None, f"the grammar library failed: {type(error).__name__}: {error}"))


def _read(checkpoint: str, vocab_size: int) -> GrammarVocabulary:
    from gplan.models import locate_checkpoint, read_headers, read_spec

    try:
        eos = read_spec(checkpoint, read_headers(checkpoint)).eos_token_ids
        path = locate_checkpoint(checkpoint) / "tokenizer.json"
        tokenizer = path.read_text()
    except (OSError, GplanError) as error:
        raise GrammarError(f"no tokenizer.json can be read: {error}", "Put one beside the checkpoint.") from error
    return GrammarVocabulary(tokenizer, vocab_size, {token for token in eos if token < vocab_size})
