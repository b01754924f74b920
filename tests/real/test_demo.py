"""The demo and the server as they are started from a shell, with a real llama-server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.real

KVALET = (sys.executable, "-P", "-m", "kvalet")


def test_chats_that_kill_a_stock_server_finish_through_kvalet(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    argv = [*KVALET, "demo", "--json", "--chats", "2", "--tokens", "150", "--ctx", "256"]
    ran = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["stock"]["finished"] == 0
    errors = {chat["error"] for chat in report["stock"]["chats"]}
    assert errors == {"Context size has been exceeded."}
    assert [chat["tokens"] for chat in report["kvalet"]["chats"]] == [150, 150]
    assert report["roomy"]["failed"] == 0
    assert sum(chat["parks"] for chat in report["kvalet"]["chats"]) >= 1
    assert 0 < report["granted_at_first_park"] <= 1
    assert report["speed_ratio"] > 0
    verify = [*KVALET, "replay", report["journal"], "--verify"]
    assert subprocess.run(verify, capture_output=True, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_served_model_says_that_it_is_ready_and_ends_when_asked(
    tmp_path: Path, sent: signal.Signals
) -> None:
    argv = [*KVALET, "serve", "--demo", "--port", "0", "--ctx", "256", "--parallel", "2"]
    argv += ["--state-dir", str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        line = serving.stdout.readline()
        found = re.fullmatch(
            r"kvalet 0\.1\.0 ready at (\S+) "
            r"\(model .+, 2 slots, 256 cells, park method (save|recompute)\)\n",
            line,
        )
        assert found, line
        assert httpx.get(f"{found[1]}/health", trust_env=False).status_code == 200
        status = httpx.get(f"{found[1]}/kvalet/status", trust_env=False).json()
        serving.send_signal(sent)
        assert serving.wait(timeout=30) == 0
    assert not Path(f"/proc/{status['server']['pid']}").exists()
