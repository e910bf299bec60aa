import subprocess
import sys

from zerolayer.engines.standstill import Standstill

HANGS = """
import time
from zerolayer.engines import standstill
standstill.STACKS_AFTER_S = 0.2
watch = standstill.Standstill(print)

def whoever_blocks_the_loop():
    time.sleep(0.6)

watch.tick(time.monotonic_ns())
whoever_blocks_the_loop()
watch.tick(time.monotonic_ns() + 4_000_000_000)
watch.end()
time.sleep(0.4)
"""


def test_only_a_long_standstill_is_noted() -> None:
    said: list[str] = []
    watch = Standstill(said.append)
    try:
        for now_ms in (5_000, 5_015, 5_900, 8_300, 8_315):
            watch.tick(now_ms * 1_000_000)
    finally:
        watch.end()
    assert said == ["this process stood still for 2.4 s"]


def test_a_process_that_hangs_shows_who_blocks_it() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=30, check=True
    )
    assert ended.stdout.startswith("this process stood still for 4.")
    assert ended.stderr.count("whoever_blocks_the_loop") == 1
