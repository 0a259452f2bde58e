"""Fills a decoder: from safetensors straight into its fused tensors, or with random numbers for a benchmark.

On the CPU the bytes of a file are read into the very memory they stay in. Elsewhere, or where the dtype differs, they
pass through one small staging buffer, so the host never holds a second copy of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from formats.plan import TensorHeader
from gplan.errors import GplanError
from gplan.models.checkpoint import Headers, locate_checkpoint, read_headers
from gplan.models.decoder import Decoder
from gplan.models.json_files import read_json
from gplan.models.rope import cos_sin_table
from gplan.models.safetensors_header import DTYPE_NAMES
from gplan.models.spec import CONFIG, ModelSpec
from gplan.models.text_files import GENERATION_CONFIG
from gplan.models.weights import EMBEDDING, HEAD, Weight, check_tensors, weights_of

STAGING_BYTES = 32 << 20
INIT_STD = 0.02


def read_spec(checkpoint: str, headers: Headers, max_len: int | None = None) -> ModelSpec:
    """Reads what the model is, and whether the checkpoint's tensors are those of such a model.

    Args:
        headers: of the same checkpoint.
        max_len: tokens of one request that are asked for; None for as many as the model was made for.

    Raises:
        UnsupportedError: what the decoder does not cover, by name.
        GplanError: a config value or a tensor that is missing or wrong, by name.
    """
    folder = locate_checkpoint(checkpoint)
    generation = folder / GENERATION_CONFIG
    spec = ModelSpec.from_config(
        read_json(folder / CONFIG),
        generation_config=read_json(generation) if generation.is_file() else None,
        tensor_dtype=headers.tensor_dtype,
        max_len=max_len,
    )
    check_tensors(spec, headers)
    return spec


def load_model(
    checkpoint: str, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str, max_len: int
) -> Decoder:
    """Loads a checkpoint's weights, tensor by tensor.

    Args:
        checkpoint: a folder, or a hub name.
        spec: of the same checkpoint.
        dtype: what the model is run in; the checkpoint's is converted.
        max_len: tokens of one request at most: rows of the rotary table.

    Raises:
        GplanError: a tensor that is missing, unexpected or of another shape, by name; a file that cannot be read.
        UnsupportedError: `max_len` beyond what the model can follow.
    """
    spec.check_max_len(max_len)
    headers = read_headers(checkpoint)
    check_tensors(spec, headers)
    found = {tensor.name: tensor for tensor in headers.tensors}
    with _Reader(headers.folder, torch.device(device)) as reader:
        weights = {weight.name: _load_weight(weight, found, reader, dtype) for weight in weights_of(spec)}
        if spec.tied_head and HEAD in found:
            _check_tied(found[HEAD], weights["embed"], reader)
    return Decoder(spec, weights, cos_sin_table(spec, max_len, device))


def random_model(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device | str, max_len: int, seed: int = 0
) -> Decoder:
    """A decoder of the given shape with random weights made on the device: for measuring, not for answers.

    Raises:
        UnsupportedError: `max_len` beyond what the model can follow.
    """
    spec.check_max_len(max_len)
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for weight in weights_of(spec):
        tensor = torch.empty(weight.shape, dtype=dtype, device=device)
        if weight.name.endswith("norm"):
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, INIT_STD, generator=generator)
        weights[weight.name] = tensor
    return Decoder(spec, weights, cos_sin_table(spec, max_len, device))


class _Reader:
    """Reads tensors of a checkpoint into given memory; keeps its files open."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder, self.device = folder, device
        self._files: dict[str, FileIO] = {}
        self._staging: Tensor | None = None

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def read_into(self, header: TensorHeader, target: Tensor) -> None:
        """Fills `target`, contiguous and of the header's shape, converting where its dtype is another."""
        dtype = _dtype(header)
        if target.dtype is dtype and target.device.type == "cpu":
            self._read(header, 0, target.view(-1).view(torch.uint8))
            return
        for start, piece in self.pieces(header):
            target.view(-1)[start : start + len(piece)].copy_(piece)

    def pieces(self, header: TensorHeader) -> Iterator[tuple[int, Tensor]]:
        """(first element, values) of consecutive stretches, each valid until the next is asked for."""
        dtype = _dtype(header)
        for start in range(0, header.nbytes, STAGING_BYTES):
            raw = self._staged(min(STAGING_BYTES, header.nbytes - start))
            self._read(header, start, raw)
            yield start // dtype.itemsize, raw.view(dtype)

    def _staged(self, nbytes: int) -> Tensor:
        if self._staging is None:
            self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        return self._staging[:nbytes]

    def _read(self, header: TensorHeader, start: int, target: Tensor) -> None:
        path = self.folder / header.file
        try:
            file = self._files.get(header.file) or self._files.setdefault(header.file, FileIO(path))
            file.seek(header.offset + start)
            view, done = target.numpy().data, 0
            while done < len(view):
                count = file.readinto(view[done:])
                if not count:
                    raise GplanError(f"{path}: ends within tensor {header.name}", "Get the file again.")
                done += count
        except OSError as error:
            raise GplanError(f"{path}: cannot be read ({error.strerror})", "Get the file again.") from error


def _load_weight(weight: Weight, found: dict[str, TensorHeader], reader: _Reader, dtype: torch.dtype) -> Tensor:
    tensor = torch.empty(weight.shape, dtype=dtype, device=reader.device)
    row = 0
    for part in weight.parts:
        reader.read_into(found[part.source], tensor[row : row + part.shape[0]])
        row += part.shape[0]
    return tensor


def _check_tied(head: TensorHeader, embedding: Tensor, reader: _Reader) -> None:
    """A head that is stored although the config ties it must be the embedding."""
    flat = embedding.view(-1)
    for start, piece in reader.pieces(head):
        if not torch.equal(piece.to(flat.device, flat.dtype), flat[start : start + len(piece)]):
            raise GplanError(
                f"{reader.folder}: {HEAD} differs from {EMBEDDING}, which the config says it is",
                "Set tie_word_embeddings to false in the checkpoint's config.",
            )


def _dtype(header: TensorHeader) -> torch.dtype:
    dtype = getattr(torch, DTYPE_NAMES[header.dtype])
    assert isinstance(dtype, torch.dtype)
    return dtype
