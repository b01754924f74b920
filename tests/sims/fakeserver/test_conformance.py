"""The simulated stock server answers in a real one's shapes, line by line."""

from __future__ import annotations

import json
from pathlib import Path

from trio.testing import MockClock

from tests.sims.conformance import GOLDEN, hear
from tests.sims.fakeserver.house import house


async def test_the_stock_generation_has_the_shapes_of_a_real_server(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    argv = ("-np", "4", "-c", "512", "--slot-save-path", str(tmp_path))
    async with house(*argv, build="G0") as it:
        heard = await hear(it.client, (512, 512))
    expected = json.loads(GOLDEN.read_text())
    assert list(heard) == list(expected)
    for name, shape in expected.items():
        assert json.dumps(heard[name]) == json.dumps(shape), name
