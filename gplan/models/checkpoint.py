"""Where a checkpoint lies and what its files state: config, tensor headers, identity. Loads no weights.

A checkpoint is a folder in the Hugging Face layout with safetensors, single or sharded, or the name of one on the hub.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from formats.plan import ModelIdentity, TensorHeader
from gplan.errors import GplanError
from gplan.models.json_files import digest_json, read_json
from gplan.models.safetensors_header import DTYPE_NAMES, read_header
from gplan.models.spec import CONFIG, ModelSpec
from gplan.models.text_files import TextDigests, read_text_digests

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DOWNLOADED = ("*.json", "*.jinja", "*.safetensors", "tokenizer.model")

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_LAYOUT_HINT = f"A checkpoint is a folder with {CONFIG} and {SINGLE_FILE}, or shards and {INDEX}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Headers:
    """What a checkpoint's files state about its tensors.

    Attributes:
        source: the checkpoint as the user wrote it; of an absolute path the last part.
        folder: where it lies on this machine.
        tensors: by name, ascending.
        file_sizes: (file name, bytes) of every tensor file, by name.
        content_digest: sha256 over the tensor files, or empty where that was not asked for.
        text: of tokenizer, chat template and generation config.
    """

    source: str
    folder: Path
    config_digest: str
    tensors: tuple[TensorHeader, ...]
    file_sizes: tuple[tuple[str, int], ...]
    content_digest: str
    text: TextDigests

    @property
    def tensor_dtype(self) -> str | None:
        """The dtype of most of the weights, by elements; None where none is a float that can be run."""
        elements: Counter[str] = Counter()
        for tensor in self.tensors:
            if tensor.dtype in DTYPE_NAMES:
                elements[DTYPE_NAMES[tensor.dtype]] += tensor.nbytes
        return elements.most_common(1)[0][0] if elements else None

    def identity(self, spec: ModelSpec) -> ModelIdentity:
        """The same for the same checkpoint wherever it lies, but for `source`."""
        return ModelIdentity(
            source=self.source,
            architecture=spec.architecture,
            dtype=spec.dtype,
            config_digest=self.config_digest,
            headers_digest=_headers_digest(self.tensors, self.file_sizes),
            content_digest=self.content_digest,
            tokenizer_digest=self.text.tokenizer,
            chat_template_digest=self.text.chat_template,
            generation_digest=self.text.generation,
            num_parameters=sum(_elements(tensor) for tensor in self.tensors),
            num_layers=spec.num_layers,
            vocab_size=spec.vocab_size,
        )


def read_headers(checkpoint: str, *, hash_contents: bool = False) -> Headers:
    """Reads the headers of every tensor file.

    Args:
        checkpoint: a folder, or a hub name.
        hash_contents: read and digest the whole files too.

    Raises:
        GplanError: no checkpoint, a missing shard or tensor (by name), a malformed file.
    """
    folder = locate_checkpoint(checkpoint)
    config = read_json(folder / CONFIG)
    files = _tensor_files(folder)
    tensors = tuple(sorted((t for file in files for t in read_header(folder / file)), key=lambda t: t.name))
    _refuse_duplicates(tensors)
    _check_index(folder, tensors)
    return Headers(
        source=source_of(checkpoint),
        folder=folder,
        config_digest=digest_json(config),
        tensors=tensors,
        file_sizes=tuple((file, (folder / file).stat().st_size) for file in files),
        content_digest=_content_digest(folder, files) if hash_contents else "",
        text=read_text_digests(folder),
    )


def locate_checkpoint(checkpoint: str) -> Path:
    """The folder of a checkpoint: a path as it is, or a hub name through the local hub cache.

    Raises:
        GplanError: neither, or a folder without a config or without safetensors.
    """
    path = Path(checkpoint)
    if path.is_dir():
        return _checked_folder(path)
    if path.exists():
        raise GplanError(f"{checkpoint} is a file, not a checkpoint", _LAYOUT_HINT)
    if not _HUB_NAME.fullmatch(checkpoint):
        raise GplanError(f"{checkpoint}: no such folder", _LAYOUT_HINT)
    return _checked_folder(_hub_folder(checkpoint))


def source_of(checkpoint: str) -> str:
    """The checkpoint as the user wrote it; of an absolute path the last part."""
    path = Path(checkpoint)
    return path.name or checkpoint if path.is_absolute() else checkpoint


def _checked_folder(folder: Path) -> Path:
    if not (folder / CONFIG).is_file():
        raise GplanError(f"{folder}: no {CONFIG}", _LAYOUT_HINT)
    if (folder / SINGLE_FILE).is_file() or (folder / INDEX).is_file():
        return folder
    if any(folder.glob("*.bin")):
        raise GplanError(
            f"{folder}: only .bin weights, which hold pickled code",
            "Convert them: load with transformers and save_pretrained writes safetensors.",
        )
    raise GplanError(f"{folder}: neither {SINGLE_FILE} nor {INDEX}", _LAYOUT_HINT)


def _hub_folder(name: str) -> Path:
    """What the hub cache holds already, else what the hub gives."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    failure: Exception
    for local_only in (True, False):
        try:
            folder = Path(snapshot_download(name, local_files_only=local_only, allow_patterns=list(DOWNLOADED)))
            return folder if not local_only else _checked_folder(folder)
        except (OSError, ValueError, HfHubHTTPError, GplanError) as error:
            failure = error
    summary = str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
    raise GplanError(
        f"{name} is no folder here, and cannot be had from the hub: {summary}",
        "Give the folder of a checkpoint, or go online and check the name (and your access) on the hub.",
    ) from failure


def _tensor_files(folder: Path) -> tuple[str, ...]:
    """File names, ascending. The single file wins, as it does in transformers."""
    if (folder / SINGLE_FILE).is_file():
        return (SINGLE_FILE,)
    files = tuple(sorted(set(_weight_map(folder).values())))
    for file in files:
        if Path(file).name != file:
            raise GplanError(f"{folder / INDEX}: {file!r} is not a plain file name", "Get the file again.")
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise GplanError(f"{folder}: missing {', '.join(missing)}, which {INDEX} names", "Get the missing files.")
    return files


def _weight_map(folder: Path) -> Mapping[str, str]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise GplanError(f"{folder / INDEX}: weight_map must map tensor names to file names", "Get the file again.")
    return weight_map


def _check_index(folder: Path, tensors: Iterable[TensorHeader]) -> None:
    """Every tensor of the index is in the very file it names."""
    if (folder / SINGLE_FILE).is_file():
        return
    found = {tensor.name: tensor.file for tensor in tensors}
    for name, file in _weight_map(folder).items():
        if found.get(name) != file:
            raise GplanError(f"{folder / file}: tensor {name} is missing, which {INDEX} places there", "Get it again.")


def _refuse_duplicates(tensors: tuple[TensorHeader, ...]) -> None:
    for first, second in pairwise(tensors):
        if first.name == second.name:
            raise GplanError(
                f"tensor {first.name} is both in {first.file} and in {second.file}", "Get the files again."
            )


def _elements(tensor: TensorHeader) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return count


def _headers_digest(tensors: Iterable[TensorHeader], file_sizes: Iterable[tuple[str, int]]) -> str:
    rows = [[t.name, t.dtype, list(t.shape), t.file, t.offset] for t in tensors]
    return digest_json({"tensors": rows, "files": [list(entry) for entry in file_sizes]})


def _content_digest(folder: Path, files: Iterable[str]) -> str:
    total = hashlib.sha256()
    for file in files:
        with (folder / file).open("rb") as stream:
            total.update(file.encode() + b"\0" + hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()
