"""`headrace` with all its commands: what `--help` shows, and documents are held to."""

from __future__ import annotations

from headrace.cli.commands import make

app = make()
