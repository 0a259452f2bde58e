"""What the command `gplan` runs first: until all is imported, an interrupt ends it without a traceback."""

from __future__ import annotations

import signal


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cli.main import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
