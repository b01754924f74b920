"""A host application that runs the whole of kvalet inside its own nursery.

    python embed_serve.py --attach http://127.0.0.1:8080     # a llama-server that runs already
    python embed_serve.py --model MODEL.gguf                 # kvalet launches one
    python embed_serve.py --demo                             # the same, with the demo model

The host asks a few questions at once, prints the answers and ends. A key that the attached
server wants is read from KVALET_UPSTREAM_KEY.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import httpx
import trio

import kvalet

QUESTIONS = ("Name a river.", "Name a mountain.", "Name a city by the sea.")


def parse_arguments() -> tuple[kvalet.Config, int]:
    parser = argparse.ArgumentParser(description="kvalet inside a host application")
    server = parser.add_mutually_exclusive_group(required=True)
    server.add_argument("--attach", metavar="URL")
    server.add_argument("--model", type=Path)
    server.add_argument("--demo", action="store_true")
    parser.add_argument("--ctx", type=int, default=2048, help="cells of a pool that is launched")
    parser.add_argument("--tokens", type=int, default=24, help="length of each answer")
    parser.add_argument("--state-dir", type=Path, help="where the journal lies")
    given = parser.parse_args()
    config = kvalet.Config(
        attach=given.attach,
        model=given.model,
        demo=given.demo,
        ctx=given.ctx,
        port=0,
        state_dir=given.state_dir or Path(tempfile.mkdtemp(prefix="host-")),
    )
    return config, given.tokens


async def ask(client: httpx.AsyncClient, question: str, tokens: int) -> None:
    """One question of the host's; prints what the model says."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": tokens,
        "temperature": 0,
    }
    answer = await client.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    said = answer.json()["choices"][0]["message"]["content"]
    print(f"{question} {said.strip()!r}", flush=True)


async def main() -> None:
    config, tokens = parse_arguments()
    async with trio.open_nursery() as nursery:
        handle: kvalet.Handle = await nursery.start(kvalet.serve, config)
        print(f"kvalet listens at {handle.url}", flush=True)
        async with (
            httpx.AsyncClient(base_url=handle.url, timeout=None) as client,
            trio.open_nursery() as askers,
        ):
            for question in QUESTIONS:
                askers.start_soon(ask, client, question, tokens)
        # Nobody asks any more: let kvalet end by itself. Cancelling would do as well.
        handle.drain()
    print(f"the journal is {config.journal_path}")


if __name__ == "__main__":
    trio.run(main)
