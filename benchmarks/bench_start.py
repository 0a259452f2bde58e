"""Seconds from starting `gplan serve` to the first healthy answer, and what they went into. One JSON line per start.

    python -m benchmarks.bench_start PLAN --checkpoint DIR [--starts 2] [--cold]

`--cold` empties Triton's compile cache before the first start. The checkpoint's tokenizer is needed, as `serve` needs
it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request

from cli.local_server import free_port

WITHIN_S = 600.0


def start_once(plan: str, checkpoint: str, environment: dict[str, str]) -> dict[str, object]:
    """Starts a server, waits for health, stops it; seconds until health and of each stage that it tells of."""
    port = free_port()
    command = [sys.executable, "-m", "cli.main", "serve", plan, "--checkpoint", checkpoint, "--port", str(port)]
    started = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        while not _is_healthy(port):
            if process.poll() is not None or time.perf_counter() - started > WITHIN_S:
                raise SystemExit(f"the server did not start: {process.stderr.read() if process.stderr else ''}")
            time.sleep(0.02)
        seconds = time.perf_counter() - started
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/server_info", timeout=10) as answer:
            info = json.load(answer)
    finally:
        process.terminate()
        process.wait()
    return {"case": "start", "seconds": seconds, "engine_seconds": info["engine_start_seconds"]}


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
            return True
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--cold", action="store_true")
    arguments = parser.parse_args()
    cache = tempfile.mkdtemp() if arguments.cold else None
    environment = os.environ | ({"TRITON_CACHE_DIR": cache} if cache else {})
    for number in range(arguments.starts):
        case = start_once(arguments.plan, arguments.checkpoint, environment)
        print(json.dumps(case | {"compile_cache": "empty" if cache and number == 0 else "warm"}), flush=True)
    if cache:
        shutil.rmtree(cache)


if __name__ == "__main__":
    main()
