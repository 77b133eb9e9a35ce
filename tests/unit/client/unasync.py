"""Write the synchronous client: the asynchronous one with other words, as httpcore and psycopg do it.

Run `python -m tests.unit.client.unasync` after a change of antiphon/client/_async.py. Needs ruff.
"""

import re
import subprocess
import sys
from pathlib import Path

COMMAND = "python -m tests.unit.client.unasync"
ROOT = Path(__file__).parents[3]
WRITTEN = ROOT / "service/antiphon/client/_async.py"
GENERATED = WRITTEN.with_name("_sync.py")

OPENING = f'''"""Synchronous client of antiphon.v1.InferenceService, and its connections.

Generated from `{WRITTEN.name}`, which is the file to change: `{COMMAND}` writes this one.
"""
'''

# Regular expressions, applied in this order where a word begins.
REPLACEMENTS = {
    r"async for (\w+) in (\w+):\n +yield \1": r"yield from \2",
    r"async (def|for|with)": r"\1",
    r"await ": "",
    r"__a(enter|exit)__": r"__\1__",
    r"AsyncGenerator\[(\w+), None\]": r"Iterator[\1]",
    r"Async(Iterator|Iterable|Client)": r"\1",
    r"AsyncGenerator": "Iterator",
    r"Iterable\[Source\] \| Iterable\[Source\]": "Iterable[Source]",
    # gRPC's synchronous API, and threads.
    r"InferenceServiceAsyncStub": "InferenceServiceStub",
    r"grpc\.aio": "grpc",
    r"asyncio": "threading",
    r"open_async": "open",
    r"many_tasks": "many_threads",
    # Public in the asynchronous client only.
    r"generate_outputs_many": "_generate_outputs_many",
    # Docstrings.
    r"from one event loop, over one connection or several": "from any thread, over one connection",
    r"(Open|close) the connections": r"\1 the connection",
    r"\n +Sources are read lazily; a synchronous iterable must not block\.": "",
    r"For one event loop": "Thread-safe",
}


def synchronous(text: str) -> str:
    """Return the module of the synchronous client for the module of the asynchronous one."""
    text = OPENING + text[text.index("\nfrom __future__") :]
    for pattern, replacement in REPLACEMENTS.items():
        text = re.sub(rf"(?<!\w){pattern}", replacement, text)
    # Shorter words: other line breaks, other order of imports, and imports that are there twice.
    return _ruff("format", _ruff("check", text, "--fix", "--quiet", "--select", "F401,F811,I"))


def _ruff(command: str, text: str, *options: str) -> str:
    words = [sys.executable, "-m", "ruff", command, *options, "--stdin-filename", str(GENERATED), "-"]
    return subprocess.run(words, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout


if __name__ == "__main__":
    GENERATED.write_text(synchronous(WRITTEN.read_text(encoding="utf-8")), encoding="utf-8")
