"""What the command `gplan` runs first: before anything else is imported, it says what an interrupt does."""

from __future__ import annotations

from cli.interrupts import handle_interrupts


def main() -> None:
    handle_interrupts()
    from cli.main import main as run

    run()


if __name__ == "__main__":
    main()
