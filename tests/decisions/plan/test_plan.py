"""Whole plans: which cards, which context, which words for the command line."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalet.actors.decisions.plan.devices import GIB, Gpu
from kvalet.actors.decisions.plan.explain import report
from kvalet.actors.decisions.plan.fit import HOST_CTX
from kvalet.actors.decisions.plan.plan import Plan, PlanInput, make_plan
from kvalet.actors.decisions.plan.price import Model, Offer
from kvalet.actors.decisions.plan.shape import Metadata, shape_of
from kvalet.actors.decisions.plan.weights import Tensor, Weights
from kvalet.protocol.errors import ConfigFault

LAYERS = 32
LAYER_BYTES = GIB // 4
METADATA: Metadata = {
    "general.architecture": "llama",
    "llama.vocab_size": 128256,
    "llama.context_length": 131072,
    "llama.embedding_length": 4096,
    "llama.block_count": LAYERS,
    "llama.feed_forward_length": 14336,
    "llama.attention.head_count": 32,
    "llama.attention.head_count_kv": 8,
}
CARD = Gpu(0, 24000, 24576)
OTHER = Gpu(1, 24000, 24576)


def tensor(name: str, size: int) -> Tensor:
    return Tensor(name=name, kind="Q8_0", dims=(size, 1), n_bytes=size)


WEIGHTS = Weights(
    tensors=(
        tensor("token_embd.weight", GIB // 2),
        *(tensor(f"blk.{layer}.ffn_up.weight", LAYER_BYTES) for layer in range(LAYERS)),
        tensor("output.weight", GIB // 2),
    )
)
ASKED = PlanInput(
    offer=Offer(model=Model(shape=shape_of(METADATA), weights=WEIGHTS)),
    argv=("-np", "4", "-kvu"),
    host=64 * GIB,
    build="b11434",
)


def codes(plan: Plan) -> set[str]:
    return {code for code, _ in plan.warnings}


def test_without_cards_everything_lies_on_the_host() -> None:
    plan = make_plan(evolve(ASKED, argv=("-c", "8192", "-np", "4", "-kvu")))

    figures = report(plan)
    assert figures["context"]["non_swa"] == figures["context"]["total"] == GIB
    assert set(figures["devices"]) == {"CPU"}
    assert figures["weights"] == {"CPU": WEIGHTS.total_bytes}
    assert (plan.split, plan.fits, plan.certain, plan.added) == ("none", True, True, ())


def test_the_context_that_is_left_out_is_the_servers_own_or_the_most_that_fits() -> None:
    servers = make_plan(ASKED)
    ours = make_plan(evolve(ASKED, choose_ctx=True, host=20 * GIB))
    tight = make_plan(evolve(ASKED, choose_ctx=True, host=12 * GIB))

    assert servers.price.context.sizes.ctx == 131072
    assert ours.flags.ctx == HOST_CTX, "nobody waits for what a processor takes for more"
    assert HOST_CTX < ours.max_ctx < 131072, "more would fit, and that is told"
    assert 4096 <= (tight.flags.ctx or 0) < HOST_CTX
    for plan in (ours, tight):
        assert plan.added == ("-c", str(plan.flags.ctx))
        assert plan.price.on("CPU") <= plan.budgets["CPU"]


def test_one_card_that_holds_all_of_it_is_pinned() -> None:
    plan = make_plan(evolve(ASKED, argv=("-c", "16384", "-np", "4", "-kvu"), gpus=(CARD, OTHER)))

    assert plan.cards == (0,)
    assert plan.added == ("-ngl", "all", "-fit", "off", "-dev", "CUDA0")
    assert plan.price.of("weights")["CPU"] == GIB // 2, "embeddings stay on the host"
    assert plan.price.on("CUDA0") <= plan.budgets["CUDA0"]


def test_the_fewest_cards_that_hold_it_share_its_layers() -> None:
    cards = tuple(Gpu(index, 8000, 8192) for index in range(4))
    plan = make_plan(evolve(ASKED, argv=("-c", "8192", "-np", "2", "-kvu"), gpus=cards))

    assert (plan.split, plan.fits, len(plan.cards)) == ("layer", True, 2)
    assert plan.price.of("kv").keys() == {"CUDA0", "CUDA1"}


def test_the_chosen_context_grows_with_memory_and_never_passes_the_models_own() -> None:
    found = [
        make_plan(evolve(ASKED, choose_ctx=True, gpus=(Gpu(0, free, 100000),))).flags.ctx or 0
        for free in (16000, 18000, 24000, 60000, 99000)
    ]

    assert found == sorted(found)
    assert found[-1] == 131072


def test_what_does_not_fit_is_planned_all_the_same_and_says_by_how_much() -> None:
    plan = make_plan(
        evolve(ASKED, argv=("-c", "131072", "-np", "4", "-kvu"), gpus=(Gpu(0, 8000, 8192),))
    )

    assert not plan.fits
    assert plan.added == (), "the server's own fitting stays on"
    message = dict(plan.warnings)["does-not-fit"]
    assert message.startswith("131072 cells need ")
    assert "lower the context" in message
    assert "estimated" not in message, "not even the least context fits"


def test_a_context_past_what_the_cards_hold_is_told_their_estimated_capacity() -> None:
    plan = make_plan(
        evolve(ASKED, argv=("-c", "131072", "-np", "4", "-kvu"), gpus=(Gpu(0, 20000, 20480),))
    )

    message = dict(plan.warnings)["does-not-fit"]
    assert 4096 < plan.max_ctx < plan.native_ctx == 131072
    assert f"{plan.max_ctx} cells is what they are estimated to hold" in message
    assert "system memory may be used" in message


def test_a_tensor_split_over_equal_cards_needs_no_shares() -> None:
    cards = (CARD, OTHER)
    argv = ("-c", "32768", "-np", "4", "-kvu", "-sm", "tensor", "-ctk", "q8_0")
    env = {"LLAMA_ARG_TENSOR_SPLIT": "1,9", "LLAMA_ARG_THREADS": "4"}
    plan = make_plan(evolve(ASKED, argv=argv, gpus=cards, env=env))

    assert (plan.split, plan.tensor_split, plan.cards) == ("tensor", (), (0, 1))
    assert "cache-type" in codes(plan)
    assert plan.flags.type_k == "f16"
    assert plan.env_removed == ("LLAMA_ARG_TENSOR_SPLIT",)


@pytest.mark.parametrize("cards", [(CARD,), (CARD, Gpu(1, 300, 24576))])
def test_a_tensor_split_without_a_second_card_becomes_a_layer_split(
    cards: tuple[Gpu, ...],
) -> None:
    env = {"LLAMA_ARG_SPLIT_MODE": "tensor"}
    argv = ("-c", "8192", "-np", "4", "-kvu", "-ctk", "q8_0")
    plan = make_plan(evolve(ASKED, argv=argv, gpus=cards, env=env))

    assert "tensor-downgraded" in codes(plan)
    assert plan.split != "tensor"
    assert plan.flags.type_k == "q8_0", "what was dropped for the tensor split is back"


def test_a_build_that_is_not_known_gets_the_larger_of_two_rule_sets() -> None:
    known = make_plan(evolve(ASKED, argv=("-c", "8192", "-np", "4")))
    unknown = make_plan(evolve(ASKED, argv=("-c", "8192", "-np", "4"), build="b99999"))

    assert unknown.price.context.bytes >= known.price.context.bytes
    assert not unknown.certain
    assert "unknown-build" in codes(unknown)


def test_a_launch_that_the_server_would_refuse_is_refused() -> None:
    with pytest.raises(ConfigFault, match="flash attention"):
        make_plan(evolve(ASKED, argv=("-c", "4096", "-fa", "off", "-ctv", "q8_0")))


def test_words_that_the_server_would_not_take_are_told() -> None:
    plan = make_plan(evolve(ASKED, argv=("-c", "4096", "-ctk", "f17")))

    assert "flag" in codes(plan)
    assert "f17" in dict(plan.warnings)["flag"]


def test_layers_that_stay_on_the_host_keep_their_weights_and_cells_there() -> None:
    plan = make_plan(evolve(ASKED, argv=("-c", "8192", "-np", "1", "-ngl", "17"), gpus=(CARD,)))

    assert plan.price.of("kv") == {"CPU": GIB // 2, "CUDA0": GIB // 2}
    assert plan.price.of("weights")["CPU"] == GIB // 2 + 16 * LAYER_BYTES
    assert not plan.certain


def test_without_a_split_the_main_card_holds_everything() -> None:
    argv = ("-c", "4096", "-np", "1", "-sm", "none", "-mg", "1")
    plan = make_plan(evolve(ASKED, argv=argv, gpus=(CARD, OTHER)))

    assert (plan.split, plan.cards) == ("none", (1,))


def test_a_drafter_is_priced_with_its_own_weights_and_cells() -> None:
    small = Model(
        shape=shape_of({**METADATA, "llama.block_count": 2}),
        weights=Weights(tensors=(tensor("blk.0.ffn_up.weight", GIB),)),
    )
    argv = ("-c", "8192", "-np", "1", "--spec-type", "draft-simple", "-md", "d.gguf")
    alone = make_plan(evolve(ASKED, argv=argv[:4], gpus=(CARD,)))
    pair = make_plan(
        evolve(ASKED, argv=argv, gpus=(CARD,), offer=evolve(ASKED.offer, drafter=small))
    )
    on_host = make_plan(
        evolve(
            ASKED,
            argv=argv,
            gpus=(CARD,),
            offer=evolve(ASKED.offer, drafter=small, drafter_on_gpu=False),
        )
    )

    assert report(pair)["context"]["draft"] == GIB // 16
    assert pair.price.on("CUDA0") - alone.price.on("CUDA0") >= GIB + GIB // 16
    assert on_host.price.of("draft") == {"CPU": GIB // 16}


def test_the_same_input_gives_the_same_plan() -> None:
    asked = evolve(ASKED, choose_ctx=True, gpus=(CARD, OTHER))

    assert report(make_plan(asked)) == report(make_plan(asked))


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(4000, 30000), st.floats(0.4, 1.0)), min_size=1, max_size=4),
    st.booleans(),
)
def test_a_plan_that_fits_overfills_no_card(found: list[tuple[int, float]], chosen: bool) -> None:
    cards = tuple(Gpu(i, int(total * free), total) for i, (total, free) in enumerate(found))
    argv = ("-np", "4", "-kvu") if chosen else ("-c", "8192", "-np", "4", "-kvu")
    plan = make_plan(evolve(ASKED, argv=argv, gpus=cards, choose_ctx=chosen))

    held = {name: plan.price.on(name) for name in plan.budgets if name != "CPU"}
    assert not plan.fits or all(held[name] <= plan.budgets[name] for name in held)
    assert plan.fits or plan.added in ((), ("-c", "4096"))


def test_a_drafter_from_a_repository_keeps_a_flat_share_free() -> None:
    argv = ("-c", "8192", "-np", "4", "-kvu")
    sized = make_plan(evolve(ASKED, argv=argv, gpus=(CARD,)))
    unsized = make_plan(
        evolve(ASKED, argv=argv, gpus=(CARD,), offer=evolve(ASKED.offer, drafter_unsized=True))
    )

    assert unsized.budgets["CUDA0"] < sized.budgets["CUDA0"]
    assert not unsized.certain
    assert "drafter-unsized" in codes(unsized)


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (("-sm", "row"), "row-split"),
        (("-ot", "ffn=CPU"), "override-tensor"),
        (("-sm", "tensor"), "tensor-split"),
    ],
)
def test_what_was_never_measured_is_doubtful_and_says_why(argv: tuple[str, ...], code: str) -> None:
    plan = make_plan(evolve(ASKED, argv=("-c", "8192", "-np", "1", *argv), gpus=(CARD, OTHER)))

    assert not plan.certain
    assert code in codes(plan)


def test_a_tensor_split_counts_its_drafter_or_is_given_up() -> None:
    def drafter(size: int) -> Offer:
        weights = Weights(tensors=(tensor("blk.0.ffn_up.weight", size),))
        shape = shape_of({**METADATA, "llama.block_count": 1})
        return evolve(ASKED.offer, drafter=Model(shape=shape, weights=weights))

    argv = ("-c", "131072", "-np", "1", "-sm", "tensor", "--spec-type", "draft-simple", "-md", "d")
    asked = evolve(ASKED, argv=argv, gpus=(CARD, OTHER))
    alone = make_plan(asked)
    small = make_plan(evolve(asked, offer=drafter(19 * GIB)))
    large = make_plan(evolve(asked, offer=drafter(40 * GIB)))

    assert (alone.split, small.split, large.split) == ("tensor", "tensor", "layer")
    assert (small.flags.ctx or 0) < (alone.flags.ctx or 0)
    assert "tensor-downgraded" in codes(large)


def test_windows_that_nobody_explains_are_a_doubt_that_is_named() -> None:
    shape = shape_of({**METADATA, "llama.attention.sliding_window": 1024})
    odd = evolve(shape, arch="no-such-architecture")
    plan = make_plan(evolve(ASKED, offer=Offer(model=Model(shape=odd, weights=WEIGHTS))))

    assert plan.price.context.layers.tier == "estimate"
    assert not plan.certain
    assert "windows-estimated" in codes(plan)
    assert "windows-estimated" not in codes(make_plan(ASKED))
