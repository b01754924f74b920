"""What a server logs of its memory, beside the plan."""

from __future__ import annotations

from attrs import evolve

from kvalet.actors.decisions.plan.judge import agrees, compare, read_log
from kvalet.actors.decisions.plan.plan import make_plan
from tests.decisions.plan.test_plan import ASKED

MIB = 1 << 20
WINDOWED = """
0.03.613.886 I llama_context: n_ctx                 = 2048
0.03.614.493 I llama_context:        CPU  output buffer size =     4.00 MiB
0.03.614.527 I llama_kv_cache_iswa: creating non-SWA KV cache, size = 2048 cells
0.03.614.607 I llama_kv_cache:        CPU KV buffer size =     6.00 MiB
0.03.617.958 I llama_kv_cache: size =    6.00 MiB (  2048 cells,   3 layers,  4/1 seqs)
0.03.620.027 I llama_kv_cache_iswa: creating     SWA KV cache, size = 2048 cells
0.03.646.357 I llama_kv_cache: size =   30.00 MiB (  2048 cells,  15 layers,  4/1 seqs)
0.03.652.775 I sched_reserve:        CPU compute buffer size =    21.77 MiB
"""
HYBRID_WITH_DRAFTER = """
I llama_context: n_ctx                 = 4096
I llama_kv_cache: size =  128.00 MiB (  4096 cells,  16 layers,  1/1 seqs)
I llama_memory_recurrent: size =  149.63 MiB (     1 cells,  64 layers,  1 seqs)
I sched_reserve:      CUDA0 compute buffer size =   130.00 MiB
I sched_reserve:  CUDA_Host compute buffer size =    40.00 MiB
I llama_context: n_ctx                 = 4096
I llama_kv_cache: size =   16.00 MiB (  4096 cells,   1 layers,  1/1 seqs)
I sched_reserve:      CUDA0 compute buffer size =    70.00 MiB
"""


def test_each_cache_is_known_by_the_line_before_it() -> None:
    reported = read_log(WINDOWED.splitlines())

    assert reported.seen
    assert reported.kept == {"non_swa": 6.0, "swa": 30.0}
    assert reported.buffers == {"output CPU": 4.0, "compute CPU": 21.77}


def test_a_second_context_is_the_drafters_and_pinned_memory_is_the_hosts() -> None:
    reported = read_log(HYBRID_WITH_DRAFTER.splitlines())

    assert reported.kept == {"non_swa": 128.0, "recurrent": 149.63, "draft": 16.0}
    assert reported.buffers == {"compute CUDA0": 200.0, "compute CPU": 40.0}


def test_a_log_that_does_not_tell_is_not_taken_for_an_empty_server() -> None:
    assert not read_log(["srv  llama_server: model loaded"]).seen


def test_what_differs_is_named_with_both_figures() -> None:
    plan = make_plan(evolve(ASKED, argv=("-c", "8192", "-np", "1")))
    lines = ["llama_context: n_ctx   = 8192", "llama_kv_cache: size = 1030.00 MiB (8192 cells)"]

    found = {one.name: one for one in compare(plan, read_log(lines))}

    assert found["context non_swa"].excess == 6 * MIB
    assert not agrees(found["context non_swa"])
    assert found["compute CPU"].reported == 0


def test_a_hundredth_of_a_mebibyte_is_the_same_figure() -> None:
    plan = make_plan(evolve(ASKED, argv=("-c", "8192", "-np", "1")))
    lines = ["llama_context: n_ctx   = 8192", "llama_kv_cache: size = 1024.01 MiB (8192 cells)"]

    found = {one.name: one for one in compare(plan, read_log(lines))}

    assert agrees(found["context non_swa"])
