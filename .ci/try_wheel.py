"""A wheel as its users have it: in a new environment, in a folder where no checkout is.

    python .ci/try_wheel.py dist/locret_stream-0.1.0-py3-none-any.whl [--sbom dist/locret-stream.cdx.json]

Demo, questions and chat, a session that goes on, the server and a LangChain turn, on the bundled model.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FACT, QUESTION = "The door code of falcon is 48213.\n", "What is the door code of falcon?"
LANGCHAIN = f"""
from langchain_locret import LocretChatModel
model = LocretChatModel(model="bundled", store="memories", max_tokens=16)
print(model.invoke({FACT + QUESTION!r}, {{"configurable": {{"thread_id": "me"}}}}).text)
"""


class Environment:
    """An environment with a wheel, in a folder of its own. Its home is empty."""

    def __init__(self, folder: Path, wheel: Path, pip_flags: str):
        self.folder, self.bin = folder, folder / "env" / "bin"
        self.env = {name: value for name, value in os.environ.items()
                    if not name.startswith(("LOCRET_", "PYTHON", "VIRTUAL_ENV"))}
        venv.create(folder / "env", with_pip=True)
        (folder / "home").mkdir()
        install = [self.bin / "python", "-m", "pip", "install", "-q", *shlex.split(pip_flags), "-c",
                   ROOT / "constraints.txt"]
        for wanted in ("torch", f"{wheel.resolve()}[langchain,serve]"):  # torch as the constraints have it
            subprocess.run([*install, wanted], cwd=folder, env=self.env, check=True)
        self.env["HOME"] = str(folder / "home")

    def run(self, *words: str, text: str = "", program: str = "locret-stream") -> str:
        """What a program of the environment prints."""
        done = subprocess.run([self.bin / program, *words], cwd=self.folder, env=self.env, input=text, text=True,
                              capture_output=True)
        if done.returncode:
            sys.exit(f"{program} {' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def serve(self) -> str:
        """The answer of its server to a question after a fact."""
        with subprocess.Popen([self.bin / "locret-stream", "serve", "--port", "0", "--json", "--store", "served"],
                              cwd=self.folder, env=self.env, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                url = json.loads(process.stdout.readline())["url"]  # ends with /v1
                for path, kind, body in ((f"{url}/sessions/me/ingest", "text/plain", (FACT * 3).encode()),
                                         (f"{url}/sessions/me/ask", "application/json",
                                          json.dumps({"question": QUESTION}).encode())):
                    request = urllib.request.Request(path, body, {"content-type": kind})
                    with urllib.request.urlopen(request, timeout=120) as answer:
                        said = answer.read().decode()
                return said
            finally:
                process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--pip-flags", default="", help="further flags for pip")
    parser.add_argument("--sbom", type=Path, help="write what the wheel brings here, as CycloneDX")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="locret-wheel-") as folder:
        began = time.monotonic()
        place = Environment(Path(folder), given.wheel, given.pip_flags)
        print(f"{given.wheel.name} is installed after {time.monotonic() - began:.0f} s", flush=True)
        where = place.run("-c", "import locret_stream; print(locret_stream.__file__)", program="python")
        assert where.startswith(str(place.folder.resolve() / "env")), where
        if given.sbom is not None:
            subprocess.run([Path(sys.executable).with_name("cyclonedx-py"), "environment", "--pyproject",
                            ROOT / "pyproject.toml", "--output-reproducible", "--of", "JSON", "-o", given.sbom,
                            place.bin / "python"], check=True)
            parts = {part["name"] for part in json.loads(given.sbom.read_text())["components"]}
            assert {"torch", "transformers", "langchain-core", "starlette"} <= parts and "pytest" not in parts, parts
        demo = place.run("demo", "--tokens", "50000")
        assert re.search(r"\b1[0-2] of 12\b", demo), demo
        (place.folder / "notes.txt").write_text(FACT)
        kept = ("run", "--session", "me", "--store", "store")
        said = {"asked": place.run(*kept, "notes.txt", "--ask", QUESTION),
                "asked again": place.run(*kept, "--ask", QUESTION),
                "chat": place.run("run", "notes.txt", text=f"{QUESTION}\n"),
                "server": place.serve(),
                "LangChain": place.run("-c", LANGCHAIN, program="python")}
        wrong = {how: answer for how, answer in said.items() if "48213" not in answer}
        assert not wrong, wrong
        verified = place.run("snapshots", "verify", "--store", "store", "--replay")
        assert "snapshots are sound" in verified and "me: agrees with its log" in verified, verified
        kept_in_home = sorted(path for path in (place.folder / "home").rglob("*") if path.is_file())
        print(f"demo, {', '.join(said)}: all right after {time.monotonic() - began:.0f} s; "
              f"{len(kept_in_home)} files in its home")


if __name__ == "__main__":
    main()
