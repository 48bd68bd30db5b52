"""Optimization profiles: every run that a state can ask for has one, and gets the tightest."""

from __future__ import annotations

import pytest

from edge.config import AttentionConfig
from edge.errors import InputError
from edge.runtime.tensorrt.profiles import EngineSizes, Profile, SizeRange, choose, profiles, sizes
from tests.engine_models import config_of

ALL = profiles(EngineSizes(window=8, batch=4, capacity=100, chunk=32))


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ({"T": 1, "A": 1, "L": 1, "B": 4}, "step"),
        ({"T": 2, "A": 1, "L": 2, "B": 1}, "verify"),
        ({"T": 8, "A": 8, "L": 8, "B": 4}, "verify"),
        ({"T": 8, "A": 1, "L": 1, "B": 1}, "verify"),
        ({"T": 9, "A": 1, "L": 1, "B": 1}, "prefill"),
        ({"T": 32, "A": 1, "L": 32, "B": 4, "C": 100, "S": 16, "P": 16}, "prefill"),
        # a tree of more than a window, a batch, a chunk, a cache, and a log, each beyond the
        # engine's
        ({"T": 9, "A": 9, "L": 9, "B": 1}, None),
        ({"T": 1, "A": 1, "L": 1, "B": 5}, None),
        ({"T": 33, "A": 1, "L": 1, "B": 1}, None),
        ({"T": 1, "A": 1, "L": 1, "C": 101}, None),
        ({"T": 1, "A": 1, "L": 1, "S": 18}, None),
    ],
)
def test_the_first_profile_that_fits_is_the_run_s(run: dict[str, int], name: str | None) -> None:
    found = choose(ALL, run)
    assert (None if found is None else ALL[found].name) == name


@pytest.mark.parametrize(("window", "chunk"), [(1, 1), (1, 16), (2, 1), (8, 4), (16, 256)])
def test_every_run_of_a_state_has_a_profile(window: int, chunk: int) -> None:
    among = profiles(EngineSizes(window=window, chunk=chunk))
    for count in range(1, window + 1):
        for tree in (1, count):
            for rows in range(1, count + 1):
                assert choose(among, {"T": count, "A": tree, "L": rows}) is not None
    for count in range(1, chunk + 1):
        assert choose(among, {"T": count, "A": 1, "L": count}) is not None


def test_a_window_of_one_has_nothing_to_verify() -> None:
    assert [each.name for each in profiles(EngineSizes(window=1))] == ["step", "prefill"]


def test_shapes_are_ordered_and_put_in_for_symbols() -> None:
    for profile in ALL:
        for dims in (["T", "B"], ["S", "B", 64], ["L"], ["A", "A"], [2, "B", 3, "C"], [], ["P"]):
            least, likely, most = profile.shapes(dims)
            assert len(least) == len(dims)
            assert all(a <= b <= c for a, b, c in zip(least, likely, most, strict=True))
            fixed = [dim for dim in dims if isinstance(dim, int)]
            assert [d for d in most if d in fixed] == [d for d in least if d in fixed]
    assert ALL[2].shapes(["S", "B", 64])[2] == (16, 4, 64)
    assert ALL[0].shapes(["T", "A", "B"]) == ((1, 1, 1), (1, 1, 4), (1, 1, 4))
    with pytest.raises(KeyError):
        ALL[0].shapes(["Z"])


def test_without_attention_there_is_no_capacity() -> None:
    assert profiles(EngineSizes())[0].symbols["C"] == SizeRange(0, 0, 0)
    assert sizes(config_of("mamba1"), 64, capacity=5).capacity == 0


def test_sizes_of_a_model_have_the_runtime_s_defaults() -> None:
    hybrid = config_of("attention")
    assert any(isinstance(layer, AttentionConfig) for layer in hybrid.layers)
    found = sizes(hybrid, 64)
    assert found == EngineSizes(window=8, batch=1, capacity=hybrid.max_context or 4096, chunk=64)


@pytest.mark.parametrize(
    ("field", "value"),
    [("window", 0), ("window", 257), ("batch", 0), ("batch", 1025), ("capacity", 0)],
)
def test_sizes_out_of_range_are_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(InputError, match=f"{field}: must be from 1 to"):
        sizes(config_of("attention"), 64, **{field: value})


def test_an_engine_covers_what_is_not_larger_than_it() -> None:
    built = EngineSizes(window=8, batch=2, capacity=50, chunk=32)
    assert built.covers(built) and built.covers(
        EngineSizes(window=4, batch=1, capacity=50, chunk=16)
    )
    for field in ("window", "batch", "capacity", "chunk"):
        larger = built.model_copy(update={field: getattr(built, field) + 1})
        assert not built.covers(larger) and larger.covers(built)


def test_symbols_that_a_run_does_not_name_are_not_asked() -> None:
    assert Profile("any", {"T": SizeRange(1, 1, 1)}).fits({})
