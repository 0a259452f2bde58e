"""Times the matrix products of a well-known shape by the library's own choice and by the best of its algorithms.

    python -m benchmarks.bench_products [--model llama-3.1-8b] [--layers 4] [--sizes 72,96,128]

One JSON line per product for which another algorithm than the library's own choice was chosen, with microseconds of
both; then what that saves, how long choosing took, and the device memory that the kernels tried have taken. Sizes are
those of the default ladders, unless given.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from benchmarks.checkpoints import CONFIGS, config_of
from gplan.core import Phase
from gplan.graphs.capture import make_graph_device
from gplan.kernels import kernels_class
from gplan.models import ModelSpec, random_model
from gplan.planning.ladders import default_ladder
from gplan.planning.planner import LADDER_PADDING
from gplan.planning.product_timing import choose_products
from gplan.planning.products import products_asked
from gplan.planning.profiler import Patience

CUDA = torch.device("cuda")
MOST = {Phase.DECODE: 256, Phase.PREFILL: 2048}


def main() -> None:
    arguments = _parse()
    spec = ModelSpec.from_config(config_of(arguments.model, arguments.layers))
    model = random_model(spec, torch.bfloat16, CUDA, max_len=1024)
    kernels = kernels_class("flashinfer")
    library = kernels.product_library(torch.bfloat16, CUDA)
    assert library is not None, "no cuBLASLt"
    asked = products_asked(model.projections(), kernels, arguments.sizes)
    graphs, outside = make_graph_device(CUDA), make_graph_device(CUDA).memory().non_torch
    started = time.perf_counter()
    found = choose_products(asked, library, graphs, Patience(), lambda *_: None)
    seconds = time.perf_counter() - started
    graphs.close()
    for choice in found.choices:
        print(
            json.dumps(
                {
                    "rows": choice.m,
                    "weight": [choice.n, choice.k],
                    "adds": choice.adds,
                    "library_us": round(choice.default.median_us, 2),
                    "chosen_us": round(choice.chosen.median_us, 2),
                }
            )
        )
    loaded = graphs.memory().non_torch - outside
    print(json.dumps({"found": found.reason, "seconds": round(seconds, 2), "non_torch_mib": round(loaded / 2**20, 1)}))


def _parse() -> argparse.Namespace:
    def sizes(text: str) -> tuple[int, ...]:
        return tuple(int(size) for size in text.split(","))

    default = sorted(
        {n for phase, most in MOST.items() for n in default_ladder(phase, most, LADDER_PADDING["cuda"][phase])}
    )
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CONFIGS, default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=8, help="layers of weights; enough to be in no cache")
    parser.add_argument("--sizes", type=sizes, default=tuple(default))
    return parser.parse_args()


if __name__ == "__main__":
    main()
